"""The table of drafter kinds: how words name its rows, what survives /load, what follows from a new row, and which
evidence drafters collect.
"""

from types import SimpleNamespace

import pytest
from fakes import VOCABULARY, Screen, checked, open_session, records_of, tiny_pair
from tiny import tiny_head

from ngram_assisted import LongestMatch, MatchDrafter, NGramStorage
from sampling import RULES, Draft, Drafter, speculative_steps
from utils.commands import default_registry
from utils.comparison.strategies import Job
from utils.config.settings import Settings
from utils.errors import UserError
from utils.metrics.results import DraftTracer
from utils.pairs import drafter_kinds, request
from utils.pairs.drafter_kinds import (
    DRAFTER_KINDS,
    BuiltDrafter,
    DrafterInputs,
    DrafterKind,
    drafter_kind,
    drafter_label,
    surviving_kinds,
)
from utils.repl.repl_session import Verdict

NAMES = [kind.name for kind in DRAFTER_KINDS]
PROMPT = [5, 9, 13, 7] * 3


@pytest.mark.parametrize("kind", DRAFTER_KINDS, ids=NAMES)
def test_a_word_names_one_row(kind: DrafterKind) -> None:
    words = [kind.name.replace("K", number) for number in ("1", "30", "9999")] if ":K" in kind.name else [kind.name]
    assert [drafter_kind(word) for word in words] == [kind] * len(words)


def test_every_word_has_a_row() -> None:
    assert tuple(NAMES) == request.DRAFTERS


def test_an_unknown_word_is_refused_with_all_names() -> None:
    with pytest.raises(UserError) as caught:
        request.check_drafter("nonsense")
    assert all(name in str(caught.value) for name in ("nonsense", *NAMES))


@pytest.mark.parametrize("number", ["", "0", "04", "-1", "1.5", "10000", "K", "x", "\N{ARABIC-INDIC DIGIT THREE}"])
def test_a_malformed_number_is_refused_with_the_form(number: str) -> None:
    with pytest.raises(UserError) as caught:
        request.check_drafter(f"layers:{number}")
    assert f"'layers:{number}'" in str(caught.value) and "layers:K" in str(caught.value)


def test_cuts_of_the_old_target_do_not_survive_load() -> None:
    assert surviving_kinds(("layers:4", "suffix", "loaded")) == ("suffix", "loaded")
    assert surviving_kinds(("layers:4",)) == ("chain",)


def test_records_and_costs_name_the_kind_of_the_loaded_drafter() -> None:
    pair = SimpleNamespace(drafter_kind="head", drafter=None)
    assert [drafter_label(word, pair) for word in ("loaded", "layers:4")] == ["head", "layers:4"]


def test_the_setting_completes_the_names_of_the_table() -> None:
    assert list(default_registry().find("drafter_kind").words) == NAMES


def test_a_new_row_can_be_selected_run_recorded_and_replayed(
    view: Screen, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its name among the words, and without a change to any other table."""

    def build(inputs: DrafterInputs) -> BuiltDrafter:
        drafter = MatchDrafter(LongestMatch(1), adaptive=inputs.adaptive("third"), observed=inputs.observed)
        return BuiltDrafter(drafter, inputs.open_session("target"))

    monkeypatch.setattr(drafter_kinds, "DRAFTER_KINDS", (*DRAFTER_KINDS, DrafterKind("third", build)))
    monkeypatch.setattr(request, "DRAFTERS", (*NAMES, "third"))
    file = tmp_path / "runs.jsonl"
    session = open_session(view, records=file)
    checked(session, file, "/ngram off", "/length 20", "/drafter_kind third", "one two one two one two")
    row = records_of(file)[0]
    assert (row["strategy"], row["drafter_kind"], row["same_as_baseline"]) == ("speculative", "third", True)
    assert row["drafted"] and "third" in dict(session.settings.costs.draft)
    assert {finding["drafter"] for finding in checked(session, file, "/whatif")["findings"]} == {"third", "ngram"}
    assert session.handle("/drafter_kind thrid") is Verdict.FAILED and "third" in view.take()[1]


class Recorded:
    """A drafter whose drafts are recorded."""

    def __init__(self, drafter: Drafter) -> None:
        self.begin, self.commit = drafter.begin, drafter.commit
        self._drafter = drafter
        self.drafts: list[Draft] = []

    def propose(self, context: list[int], count: int) -> Draft:
        self.drafts.append(self._drafter.propose(context, count))
        return self.drafts[-1]


def drafts_of(word: str, verify: str, tracer: DraftTracer | None) -> list[Draft]:
    """The drafts of a run of a fresh job."""
    pair, rule = tiny_pair(chat=False, num_hidden_layers=2), RULES[verify]
    if word == "head":
        pair.drafter, pair.drafter_kind = tiny_head(pair.target), "head"
    word = "loaded" if word in ("model", "head") else word
    settings = Settings(length=8, gamma=3, verify=verify)
    job = Job(PROMPT, pair, settings, NGramStorage(3, VOCABULARY), drafter=word, tracer=tracer)
    built = job.build_drafter()
    drafter = Recorded(built.drafter)
    list(speculative_steps(PROMPT, drafter, built.target, job.decoding, gamma=3, rule=rule))
    return drafter.drafts


EVIDENCE = {"model": "logits", "head": "logits", "layers:1": "logits"} | dict.fromkeys(
    ("lookup", "suffix", "ngram"), "match_lengths"
)


@pytest.mark.parametrize(
    ("word", "evidence", "verify"),
    [
        # Drafts of matches are one-hot under every rule.
        pytest.param(*row, verify, marks=pytest.mark.full if verify == "coupled" and row[1] != "logits" else ())
        for row in EVIDENCE.items()
        for verify in ("rejection", "coupled")
    ],
)
def test_drafters_collect_evidence_only_for_a_tracer(word: str, evidence: str, verify: str) -> None:
    unobserved, observed = (drafts_of(word, verify, tracer) for tracer in (None, DraftTracer()))
    assert [draft.tokens for draft in unobserved] == [draft.tokens for draft in observed]
    assert all(draft.evidence is None for draft in unobserved)
    made = [draft for draft in observed if draft.tokens]
    assert made and all(draft.evidence is not None for draft in made)
    assert all(len(getattr(draft.evidence, evidence)) == len(draft.tokens) for draft in made)
