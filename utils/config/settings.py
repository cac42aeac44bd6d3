"""Settings: one frozen value per session. Each setting is one row: a field with everything that is known about it.

The command, its reply, its page of /help, completion, a flag, the settings in records, and the tables of
`utils/commands/README.md` follow from a row. A part of a field, such as the temperature, has a row of its own. It is
shown, parsed and changed like a field, but records have the field.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any

from utils import bounds
from utils.bounds import WholeRange
from utils.config import value_types as types
from utils.config.value_types import Limits, ProcessorSpec, StorageSpec, ValueType
from utils.errors import UserError, check_choice, naming
from utils.metrics.costs import Costs
from utils.pairs.request import CHAIN
from utils.text import encodable


def _setting(default: Any, value_type: ValueType, group: str = "", summary: str = "", **row: Any) -> Any:
    """A row: see Setting. Without a group it has no command of its own."""
    return field(default=default, metadata=row | {"value_type": value_type, "group": group, "summary": summary})


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a user can change. A run uses a snapshot; commands make new snapshots."""

    speculative: bool = _setting(True, types.ON_OFF, "strategies", "speculative decoding with the drafter")
    ngram: bool = _setting(
        True,
        types.ON_OFF,
        "drafting",
        "n-gram assisted decoding; its storage",
        text="Drafts come from n-grams of the prompt, of the text so far and of the target's top tokens, which a "
        "storage counts; with 1 candidate only generated tokens. Its oldest n-grams are dropped first. /ngram keep "
        "also keeps the texts of suffix and chain.",
        example=("order 4", "ngram order: 4"),
        forms={"on": "run n-gram assisted decoding", "off": "do not run it"},
        rank=3,
    )
    target: bool = _setting(
        True,
        types.ON_OFF,
        "strategies",
        "the target alone, the baseline",
        text="All speed-ups and comparisons of texts refer to this run.",
    )
    drafter: bool = _setting(False, types.ON_OFF, "strategies", "the drafter alone")
    beams: int = _setting(
        0,
        types.number(WholeRange(0, 16)),
        "strategies",
        "a beam search with N beams, 0 to 16",
        text="It has a length penalty, and its text differs from the other strategies. 0 turns it off.",
        example=("4",),
    )
    gamma: int | None = _setting(
        None,
        types.number_or(types.number(WholeRange(0, bounds.MAX_GAMMA)), "auto"),
        "drafting",
        "maximum drafts per round, 0 to 63",
        text="With auto, every round drafts as many tokens as have the highest expected throughput, given the "
        "acceptance so far and the costs of drafting and verifying in the present context. It drafts nothing where a "
        "run could lose more than about 3 % of its time, and a drafter that is not used does not read the prompt.",
        example=("4",),
        forms={"N": "0 to 63; 0: no drafts", "auto": "as many as are likely to pay"},
        rank=1,
    )
    drafter_kind: tuple[str, ...] = _setting(
        (CHAIN,),
        types.DRAFTER_KINDS,
        "drafting",
        "what drafts; several kinds are compared",
        text="The default, chain, drafts what followed earlier in the texts where that is expected to gain more, and "
        "otherwise asks the drafter of the pair. /race shows what the matches gain after /drafter_kind chain loaded.",
        example=("loaded suffix",),
        forms={
            "loaded": "the drafter of the pair",
            "layers:K": "the first K layers of the target",
            "lookup": "prompt lookup",
            "suffix": "a suffix automaton of the texts",
            "chain": "matches of suffix, or the drafter of the pair",
        },
        rank=2,
    )
    costs: Costs | None = _setting(
        None,
        types.COST_TABLE,
        "drafting",
        "costs of drafting and verifying",
        text="What verifying 1, 2, ... drafts costs in addition to a target forward over one token, and what one "
        "draft of each kind and reading 1,000 tokens of a prompt cost. The unit is one such target forward. They are "
        "measured on the loaded models, in a short and in a long context; /gamma auto, /why and /whatif depend on "
        "them.",
        example=(
            "measure",
            "costs: verifying k drafts costs 1 + (k=1: 0.19, 2: 0.22, 3: 0.26)",
            "target forwards; one draft by head 0.07",
        ),
        forms={
            "measure": "measure them on the loaded models",
            "verify V1 V2 ...; KIND C; read KIND C": "use these",
            "at N; ...; at N STEP; ...": "tables of two context lengths",
        },
    )
    length: int = _setting(
        128,
        types.number(WholeRange(1), limit="context"),
        "decoding",
        "maximum number of new tokens",
        text="At most the context length of the target.",
        example=("256",),
        rank=1,
    )
    processor: ProcessorSpec = _setting(
        types.GREEDY,
        types.PROCESSOR,
        "decoding",
        "temperature, top-k, top-p in one line",
        text="They apply to the target's logits in this order.",
        example=("nucleus 0.8 0.95",),
        forms={
            "greedy": "[T]: the likeliest token",
            "multinomial": "T: sample at temperature T",
            "topk": "T K: the K likeliest tokens at temperature T",
            "nucleus": "T P: a probability mass of P at temperature T",
            "topknucleus": "T K P: both",
        },
    )
    seed: int = _setting(
        42,
        types.number(bounds.SEED),
        "decoding",
        "seed of every strategy, 0 to 2**32 - 1",
        text="The same seed, settings and models give the same texts.",
        example=("7",),
        is_flag=True,
    )
    verify: str = _setting(
        "rejection",
        types.choice(bounds.RULES, "rule"),
        "drafting",
        "the rule that accepts drafts",
        text="All rules keep the target's distribution; under greedy decoding they are the same. block is the rule "
        "of Sun et al. 2024. coupled gives the text of the target alone for the same seed.",
        forms={
            "rejection": "accept each draft with probability min(1, p/q)",
            "block": "accept drafts jointly, at least as many",
            "coupled": "the same text as the target alone",
        },
    )
    engine: str = _setting(
        "auto",
        types.choice(bounds.ENGINES, "engine"),
        "decoding",
        "how layers are computed",
        text="Alone it shows what was measured of each engine. auto gives up equal bits for more than 10 % of speed "
        "only. Results are kept for later.",
        forms={
            "auto": "the fastest one, by measurement",
            "plain": "PyTorch unchanged",
            "invariant": "equal texts bit for bit; compiled for the processor, on CPUs",
            "cuda_graph": "forward passes are recorded once and replayed, on CUDA devices",
            "test": "test and measure it again; with auto, all engines",
        },
        fact="engine now",
        is_flag=True,
    )
    threads: int = _setting(
        0,
        types.number_or(types.number(bounds.THREADS), "auto", value=0),
        "decoding",
        "number of CPU threads",
        text="At most the number of cores.",
        example=("1",),
        forms={"N": f"{bounds.THREADS}", "auto": "the fastest number, unless OMP_NUM_THREADS is set"},
        fact="engine now",
        is_flag=True,
    )
    cache: bool = _setting(
        True,
        types.ON_OFF,
        "decoding",
        "keep keys and values between rounds",
        text="off computes all tokens again in every round: the text is the same, but every strategy is slow.",
    )
    chat: bool | None = _setting(
        None,
        types.choice({"on": True, "off": False, "auto": None}, "value"),
        "prompts",
        "put prompts into the chat template",
        forms={"on": "use it", "off": "send prompts as they stand", "auto": "use it if there is one"},
        fact="chat now",
    )
    system: str | None = _setting(
        None,
        types.SYSTEM_PROMPT,
        "prompts",
        "system prompt of the chat template",
        example=("Answer in one sentence.",),
        forms={"TEXT": "a system prompt", "none": "an empty one", "default": "the one of the chat template"},
        needs_chat=True,
    )
    request: str = _setting(
        "",
        types.REQUEST,
        "prompts",
        "tools, keywords of the chat template",
        text="What goes with every prompt to the chat template and to servers, as in requests to vLLM: tools, "
        "tool_choice and chat_template_kwargs, such as enable_thinking. response_format (json_object or json_schema) "
        "constrains local texts, too; tool_choice does not. Lines of prompt files may have fields of their own.",
        example=('{"chat_template_kwargs": {"enable_thinking": false}}',),
        forms={"JSON": "these fields", "none": "the prompt alone"},
        needs_chat=True,
    )
    turns: bool = _setting(
        False,
        types.ON_OFF,
        "prompts",
        "continue the conversation",
        text="Every strategy continues its own answers; a turn that was interrupted or failed is not kept.",
        forms={"on": "continue it with each prompt", "off": "begin a new one with each prompt", "new": "forget it"},
        needs_chat=True,
    )
    special: bool = _setting(
        False,
        types.ON_OFF,
        "prompts",
        "read names of special tokens in prompts",
        text="on: names such as <|im_end|> in a prompt become the special tokens that they name, not text.",
    )
    # Subcommands of /ngram set these four: NGRAM_PARTS.
    ngram_storage: StorageSpec = _setting(StorageSpec("basic", 3), types.STORAGE)
    ngram_limit: int = _setting(1_000_000, types.number(bounds.NGRAM_LIMIT))
    top_k_filler: int = _setting(3, types.number(bounds.FILLER_TOP_K))
    reset_in_between: bool = _setting(True, types.ON_OFF)
    debug: str = _setting(
        "off",
        types.choice(("on", "off", "full"), "level"),
        "results",
        "show every round while it runs",
        text="A line for each round has its drafts (+ accepted, - rejected), the target's token (= correction, * "
        "bonus) and its time; rounds without drafts share a line. full: also p/q as colours and shapes, why each "
        "draft was rejected, and where n-grams and matches were found.",
        forms={"on": "a line per round", "off": "the texts only", "full": "also p/q, and why drafts were rejected"},
        rank=4,
    )

    # Not a setting: whether the loaded tokenizer has a chat template. The session sets it.
    chat_template: bool = True

    @property
    def uses_chat(self) -> bool:
        """Whether prompts are put into a chat template."""
        return self.chat_template and self.chat is not False

    @property
    def max_drafts(self) -> int:
        """Maximum number of drafts per round."""
        return bounds.AUTO_GAMMA if self.gamma is None else self.gamma

    @property
    def keeps_conversation(self) -> bool:
        """Whether each prompt continues the conversation."""
        return self.turns and self.uses_chat


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table.

    `name` is the field, or the typed words of a part. `group` is a heading of /help, empty for a field that only parts
    set; `summary` and `rank` are as in a Command. `text` is what its page says in addition. `example` is an argument to
    type, by default a word, and the lines that it shows unless they repeat it. `forms` describe what can be typed.
    `fact` is the label in /show of the value in effect.
    """

    name: str
    value_type: ValueType
    get: Callable[[Settings], Any]
    put: Callable[[Settings, Any], Settings]
    default: Any = None
    group: str = ""
    summary: str = ""
    text: str = ""
    example: tuple[str, ...] = ()
    forms: Mapping[str, str] = field(default_factory=dict)
    rank: int = 0
    needs_chat: bool = False
    fact: str = ""
    is_flag: bool = False

    def show(self, settings: Settings) -> str:
        """The value as it would be typed."""
        return self.value_type.show(self.get(settings))

    def describe(self, settings: Settings) -> str:
        """The value for reading, if that differs from the typed form."""
        value = self.get(settings)
        return value.text if isinstance(value, Costs) else self.show(settings)

    def change(self, settings: Settings, text: str, limits: Limits) -> Settings:
        """New settings with the parsed value of `text`. Raises UserError if it is not valid."""
        return self.put(settings, self.value_type.parse(text, self.get(settings), limits))


def _put(name: str, settings: Settings, value: Any) -> Settings:
    return replace(settings, **{name: value})


@cache
def setting_fields() -> Mapping[str, Setting]:
    rows = (
        Setting(
            entry.name,
            get=attrgetter(entry.name),
            put=partial(_put, entry.name),
            default=entry.default,
            **entry.metadata,
        )
        for entry in fields(Settings)
        if entry.metadata
    )
    return {row.name: row for row in rows}


SAMPLING_PARTS = (
    Setting(
        "temperature",
        types.number(bounds.TEMPERATURE, usage="T"),
        lambda settings: settings.processor.effective_temperature,
        lambda settings, value: replace(settings, processor=settings.processor.changed(temperature=value)),
        group="decoding",
        summary="temperature, 0 to 100; 0: greedy",
        text="Greedy decoding has no top-k and top-p. Any other temperature keeps those that are set.",
        example=("0.7", "temperature: 0.7; processor: multinomial 0.7"),
        rank=2,
    ),
    Setting(
        "top_k",
        types.number_or(types.number(WholeRange(0), limit="vocabulary", usage="K"), "off", same=0),
        lambda settings: settings.processor.top_k,
        lambda settings, value: replace(settings, processor=settings.processor.changed(top_k=value)),
        group="decoding",
        summary="sample from the K likeliest tokens",
        text="The temperature and top-p stay, but that of greedy decoding becomes 1.",
        example=("40", "top_k: 40; processor: topk 0.7 40"),
        forms={"K": "1 to the size of the vocabulary", "off": "or 0: sample from all tokens"},
    ),
    Setting(
        "top_p",
        types.number_or(types.number(bounds.TOP_P, usage="P"), "off", same=1),
        lambda settings: settings.processor.top_p,
        lambda settings, value: replace(settings, processor=settings.processor.changed(top_p=value)),
        group="decoding",
        summary="sample from a probability mass of P",
        text="The temperature and top-k stay, but that of greedy decoding becomes 1.",
        example=("0.95", "top_p: 0.95; processor: nucleus 0.7 0.95"),
        forms={"P": "above 0, at most 1", "off": "or 1: sample from all tokens"},
    ),
)
NGRAM_PARTS = (
    replace(
        setting_fields()["ngram_storage"],
        name="ngram kind",
        value_type=replace(types.STORAGE, show=attrgetter("kind")),
        summary="n-grams of all orders, or of one",
    ),
    Setting(
        "ngram order",
        types.number(bounds.NGRAM_ORDER),
        lambda settings: settings.ngram_storage.order,
        lambda settings, value: replace(settings, ngram_storage=replace(settings.ngram_storage, order=value)),
        summary="order of the n-grams, 2 to 16",
    ),
    replace(
        setting_fields()["top_k_filler"],
        name="ngram candidates",
        summary="top tokens stored per position, 1 to 64",
    ),
    replace(
        setting_fields()["ngram_limit"],
        name="ngram limit",
        summary="maximum number of n-grams, about 100 bytes each",
    ),
    Setting(
        "ngram keep",
        types.ON_OFF,
        lambda settings: not settings.reset_in_between,
        lambda settings, value: replace(settings, reset_in_between=not value),
        summary="keep the n-grams from prompt to prompt",
    ),
)


@cache
def listed_settings() -> Mapping[str, Setting]:
    """Every setting once, by the words after the slash. Together they restore all settings."""
    rows = {name: row for name, row in setting_fields().items() if row.group}
    return rows | {part.name: part for part in NGRAM_PARTS}


def split_setting(line: str) -> tuple[str, str] | None:
    """The name and the value in a command line that sets a setting, or None. The value is not checked."""
    words = line.removeprefix("/").split(" ", 2)
    # The longer name first: "ngram order 3" is not the value "order 3" of ngram.
    for length in (2, 1):
        name, value = " ".join(words[:length]), " ".join(words[length:])
        if value and name in listed_settings():
            return (name, value) if line.startswith("/") else None
    return None


@cache
def known_settings() -> Mapping[str, Setting]:
    """All settings by their names in a config file."""
    rows = (*SAMPLING_PARTS, *listed_settings().values())
    return {row.name.replace(" ", "_"): row for row in rows}


def flag_settings() -> list[Setting]:
    return [row for row in setting_fields().values() if row.is_flag]


def apply_typed(settings: Settings, values: Mapping[str, str], limits: Limits) -> Settings:
    """New settings with typed values by name. Raises UserError for an unknown name or an invalid value."""
    for name, text in values.items():
        setting = known_settings()[check_choice(name, tuple(known_settings()), "setting")]
        with naming(f"settings.{name}"):
            if not text:  # an empty text would toggle the setting
                raise UserError("it is empty: write a value, or leave the entry out.")
            settings = setting.change(settings, text, limits)
    return settings


def reset_unsupported(settings: Settings, limits: Limits) -> Settings:
    """New settings in which values that the target does not support are reset to their defaults."""
    for setting in setting_fields().values():
        try:
            # A value is supported if the text of `show` can be parsed under the new limits.
            setting.change(settings, setting.show(settings), limits)
        except UserError:
            settings = setting.put(settings, setting.default)
    return settings


def as_json(settings: Settings) -> dict[str, bool | int | str]:
    """Settings for a record: numbers and booleans as they are, everything else as it would be typed."""
    values = ((row, row.get(settings)) for row in setting_fields().values())
    recorded = {row.name: value if isinstance(value, int) else row.show(settings) for row, value in values}
    return recorded | {"chat": settings.uses_chat}  # the value in effect, not `auto`


def from_json(values: Mapping[str, object], limits: Limits) -> tuple[Settings, list[str]]:
    """Settings from the values of a record, and a sentence for each value that is missing or not supported here."""
    settings = Settings()
    problems = [f"setting {name}: not known here" for name in values if name not in setting_fields()]
    for setting in setting_fields().values():
        try:
            value = values.get(setting.name, "")
            text = ("off", "on")[value] if isinstance(value, bool) else encodable(str(value))
            if not text:  # an empty text would toggle the setting
                raise UserError("not recorded.")
            settings = setting.change(settings, text, limits)
        except UserError as error:
            # The part after the semicolon advises what to type, which does not apply to a record.
            reason = str(error).partition(";")[0].rstrip(".")
            problems.append(f"setting {setting.name}: {reason}; it is {setting.show(settings)} instead")
    return settings, problems
