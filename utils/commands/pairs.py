"""/load and /pair: load other models within the session, and check whether two models fit together."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf

from utils.commands.experiments.speed_model import expected_drafts, read_text
from utils.commands.servers.server_doctor import TABLE as CAUSES
from utils.commands.servers.server_doctor import checked, long_prompts, row_of, sentence, unclear
from utils.commands.shared.registry import Command, CommandContext, Outcome, Reply, ShowRows
from utils.commands.shared.result_tables import NOTHING, ResultColumn, ResultTable, Row
from utils.commands.verdicts.measurement import BUILT_IN, plan_prompts
from utils.comparison.harness import Harness
from utils.comparison.records import Countdown
from utils.config.settings import Settings
from utils.decode.model_info import context_length
from utils.errors import UserError, check_choice
from utils.metrics import draft_causes as causes
from utils.models.feature_drafter import FeatureDrafter
from utils.pairs import doctor
from utils.pairs.request import PAIRS, PUBLISHED, PairRequest, parse_request

NOT_TRIED = "not tried: no hub connection where this was built; their formats were checked on random weights."
CAUSE_TOKENS, LONG_TOKENS = 24, 512  # new tokens of each text, and tokens of a long prompt
LEAST = "Expected is at least 0.15 for the first draft, half of the draft before it, and half of that in greedy texts."
CORRECTED = "The correction holds from now on, and at later starts; results so far were those of the old reading."


def _load(argument: str, context: CommandContext) -> Outcome:
    harness = context.harness
    current = harness.pair.request if harness.has_pair else PairRequest("", None)
    request = parse_request(argument, current, context.pairs)
    if not request.target:
        raise UserError("name a target too, because no model is loaded: /load target=FOLDER, or a pair by name.")
    return [request]


def _pair(argument: str, context: CommandContext) -> Outcome:
    if argument:
        return PAIR_FORMS[check_choice(argument.lower(), tuple(PAIR_FORMS), "word")][0](context)
    found = context.harness.pair.compatibility
    findings = [(finding.what, finding.value, finding.remark) for finding in found.findings]
    return [ShowRows([("verdict", found.verdict, ""), *findings])]


def _doctor(context: CommandContext) -> Outcome:
    """The readings of a drafter that reads hidden states, and then the causes of rejections of any drafter."""
    harness, settings, name = context.harness, context.settings, context.harness.pair.drafter_name
    drafter = harness.pair.drafter
    if drafter is None or harness.pair.drafter_tokenizer is not None:
        raise UserError("/pair doctor examines a drafter with the target's tokenizer, and none is loaded.")
    local = LocalCauses(harness, settings)
    subject, title = (doctor.OWN_PROMPT, settings), f"/pair doctor: {name}"
    last = CAUSES.report("drafter doctor", *subject, local.rows(), conclude=local.conclusion, title=title)
    if not isinstance(drafter, FeatureDrafter):
        return [last]
    lines: list[str] = []  # empty if it is interrupted
    rows = _examined(harness, settings, drafter, lines)
    return [TABLE.report("doctor", *subject, rows, conclude=lambda rows: lines, title=title), last]


@dataclass(slots=True)
class LocalCauses:
    """The causes of /server doctor for the loaded pair. What is expected comes from its own simpler texts."""

    harness: Harness
    settings: Settings
    probes: list[causes.Probe] = field(default_factory=list)
    found: list[causes.Contrast] = field(default_factory=list)

    def rows(self) -> Iterator[Row]:
        pair = self.harness.pair
        prompts = [prompt.text for prompt in plan_prompts(BUILT_IN, ()).measured if self._fits(prompt.text)]
        if not prompts:
            raise UserError("the built-in prompts are longer than the target's context length.")
        size = min(LONG_TOKENS, (context_length(pair.target) or LONG_TOKENS) // 2)
        kinds = {causes.GREEDY: prompts, causes.SAMPLED: prompts, causes.LONG: long_prompts(prompts, size, self._size)}
        if self.settings.uses_chat:
            kinds[causes.TEMPLATE] = prompts
        for kind, texts in kinds.items():
            settings = replace(self.settings, chat=False) if kind == causes.TEMPLATE else self.settings
            measured, countdown = list[causes.Counts](), Countdown(self.harness.progress)
            for place, text in enumerate(texts):
                countdown.at(place / len(texts), f"{kind} texts: {place} of {len(texts)}")
                # A place without counts keeps the places of the others, because prompts are compared across kinds.
                measured.append(self._counts(kind, text, settings) if self._fits(text) else ())
            self.probes.append(causes.Probe(kind, measured, self._expected(kind, measured)))
        self.found = causes.contrasts(self.probes)
        if not self.found:
            raise UserError("the drafter made no drafts on any text.")
        yield from map(row_of, self.found)

    def _fits(self, text: str) -> bool:
        return self._size(text) + 2 * CAUSE_TOKENS < (context_length(self.harness.pair.target) or inf)

    def _size(self, text: str) -> int:
        return len(self.harness.prompt_ids(text, self.settings))

    def _counts(self, kind: str, text: str, settings: Settings) -> causes.Counts:
        """The drafts along the target's own answer."""
        pair, prompt = self.harness.pair, self.harness.prompt_ids(text, settings)
        temperature = (settings.processor.effective_temperature or 1.0) if kind == causes.SAMPLED else 0.0
        answer = doctor.own_text(pair.target, prompt, CAUSE_TOKENS, lambda line: None, temperature=temperature)
        job = self.harness.job(prompt, settings)
        read = read_text(job, answer[len(prompt) :], pair.feature_layers)
        return expected_drafts(job, read, temperature, settings.max_drafts)[0]

    def _expected(self, kind: str, measured: Sequence[causes.Counts]) -> list[causes.Counts]:
        """The least that is expected: LITTLE of the first drafts, and otherwise half of the draft before it, or half of
        what is accepted in greedy texts.
        """
        simple = measured if kind == causes.GREEDY else self.probes[0].measured
        rates = [causes.rate(simple, place) or 0.0 for place in range(self.settings.max_drafts)]
        if kind == causes.GREEDY:
            rates.insert(0, 2 * doctor.LITTLE)
        return [[(rates[place] / 2 * count, count) for place, (_, count) in enumerate(one)] for one in measured]

    def conclusion(self, rows: Sequence[Row]) -> list[str]:
        cause, shown = causes.diagnose(self.probes, self.found)
        if cause is causes.DraftCause.UNCLEAR or shown is None:
            return [unclear(shown, len(self.probes[0].measured)), checked(self.found)]
        return [sentence(cause, shown), LEAST, checked(self.found)]


def _examined(harness: Harness, settings: Settings, drafter: FeatureDrafter, lines: list[str]) -> Iterator[Row]:
    """Compare the readings of the loaded drafter, and switch to the best one if it is significantly better. What was
    found is added to `lines`.
    """
    pair, prompt = harness.pair, harness.prompt_ids(doctor.OWN_PROMPT, settings)
    harness.progress(f"generating {doctor.TEXT_TOKENS} tokens of the target ...")
    text = doctor.own_text(pair.target, prompt, doctor.TEXT_TOKENS, pair.engine.report)
    found = doctor.examine(drafter, pair.target, text, len(prompt), report=pair.engine.report)
    if not doctor.other_readings(drafter):
        harness.note("This format leaves nothing to convention.")
    # Nothing below takes time, so that Ctrl-C cannot come between the correction and its rows.
    lines.append(found.conclusion())
    if found.better is not None:
        doctor.use(pair, found.used.conventions)
        lines.append(CORRECTED)
    for reading in found.readings:
        yield _figures(reading, found)


def _agreement(row: Row, place: int) -> str:
    """The agreement of one draft, with a dash for drafts beyond those of the drafter."""
    return f"{row['agreement'][place]:.2f}" if place < len(row["agreement"]) else NOTHING


TABLE = ResultTable(
    ResultColumn("reading", lambda row: row["reading"] or "as it is read now"),
    *(ResultColumn(f"draft {place + 1}", partial(_agreement, place=place)) for place in range(doctor.DEPTH)),
)


def _figures(reading: doctor.Reading, found: doctor.Examination) -> Row:
    return {
        "reading": reading.name,
        **asdict(reading.conventions),
        "agreement": list(reading.agreement),
        "positions": found.positions,
        "is_used": reading is found.used,
        "reads_target": found.reads_target,
        "displaced_agreement": found.displaced,
    }


def _known(context: CommandContext) -> Outcome:
    rows = []
    for name, pair in context.pairs.items():
        state, drafter = "not tried" * (name in PUBLISHED), pair.drafter or "the first layers of the target"
        rows.append((name, state, f"{pair.target} + {drafter}: {pair.summary}"))
    return [ShowRows(rows), Reply(NOT_TRIED)]


PAIR_FORMS: dict[str, tuple[Callable[[CommandContext], Outcome], str]] = {
    "list": (_known, "the pairs that can be loaded by name"),
    "doctor": (_doctor, "whether a drafter is read rightly, and on which texts its drafts fail"),
}
PAIR_COMMANDS = (
    Command(
        "load",
        "PAIR",
        "load other models",
        _load,
        group="models",
        rank=1,
        about="What is not named stays the same, but a new target drops the old drafter. If loading fails, the old "
        "pair stays.",
        example=("> /load target=Qwen/Qwen3-4B drafter=Qwen/Qwen3-0.6B", "target Qwen3-4B, drafter Qwen3-0.6B"),
        syntax=("/load PAIR    one of /pair list", "/load target=... drafter=... quantize=... device=... dtype=..."),
        words={name: pair.summary for name, pair in PAIRS.items()},
    ),
    Command(
        "pair",
        f"[{'|'.join(PAIR_FORMS)}]",
        "whether the two models fit together",
        _pair,
        group="models",
        about="Why, and what to change: vocabularies, sizes, context lengths and caches.",
        example=("> /pair", "verdict   fine"),
        syntax=("/pair", *(f"/pair {word}    {meaning}" for word, (_, meaning) in PAIR_FORMS.items())),
        words={word: meaning for word, (_, meaning) in PAIR_FORMS.items()},
    ),
)
