"""/why: the costs of a run add up, its main limit is named, and the record and the screen show both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import Screen, open_session, records_of, table_pair

from utils.commands.experiments.speed_model import bottleneck, draft_figures
from utils.commands.whatif import WHY_TABLE as TABLE
from utils.decode.steps import FinishReason, Step
from utils.metrics.results import Generation, RoundTiming
from utils.pairs.drafter_kinds import drafter_kind
from utils.repl.repl_session import Verdict


def generation(rounds: list[tuple[int, int]], timing: RoundTiming) -> Generation:
    """A run with these numbers of (drafted, accepted) tokens in its rounds."""
    steps = tuple(Step(tuple(range(drafted)), accepted, 9) for drafted, accepted in rounds)
    return Generation(
        steps, 10.0, 1.0, FinishReason.LENGTH, tuple(replace(timing, drafts=drafted) for drafted, _ in rounds)
    )


@pytest.mark.parametrize(
    ("rounds", "timing", "words"),
    [
        ([(0, 0), (0, 0), (1, 1)], RoundTiming(1, 2, 3), ["nothing is drafted", "67%"]),
        ([(2, 2)] * 4, RoundTiming(1, 2, 9), ["outside the models", "without it about 3.0x"]),
        ([(4, 3)] * 4, RoundTiming(1, 8, 9), ["verifying several tokens", "4.0 drafts takes 8.00 decode steps", "75%"]),
        ([(2, 1)] * 4, RoundTiming(4, 2, 6), ["cost of drafting", "a draft 2.00"]),
        ([(4, 0)] * 3 + [(4, 1)], RoundTiming(0.1, 2, 2.1), ["rejection", "6% of the drafts"]),
    ],
)
def test_the_bottleneck_is_named(rounds: list[tuple[int, int]], timing: RoundTiming, words: list[str]) -> None:
    """The target alone takes 1 second for each of its tokens, and no time for the prompt."""
    target = Generation(tuple(Step((), 0, token) for token in range(9)), 9.0, 1.0, FinishReason.LENGTH)
    sentence = bottleneck(draft_figures([(generation(rounds, timing), target)], 1.0))
    assert all(word in sentence for word in words), sentence


def test_tokens_that_a_grammar_forces_are_generated_without_rejections_as_well() -> None:
    """Rounds of a forced token, a rejected draft and a correction: without rejections, 3 tokens instead of 2."""
    target = Generation(tuple(Step((), 0, token) for token in range(9)), 9.0, 1.0, FinishReason.LENGTH)
    made = generation([(2, 1)] * 4, RoundTiming(0, 1, 1))
    forced = replace(made, steps=tuple(replace(step, forced=(0,)) for step in made.steps))
    figures = draft_figures([(forced, target)], 1.0)
    assert figures["drafted"] == 4 and figures["accepted"] == 0
    assert figures["limits"]["rejection"] == pytest.approx(3 / 2)


def test_a_long_prefill_does_not_change_the_cost_of_verifying() -> None:
    """Verify passes take 1.5 decode steps, and prefills of 100 to 130 seconds differ between runs."""
    target = Generation(tuple(Step((), 0, token) for token in range(9)), 108.0, 100.0, FinishReason.LENGTH)
    for prefill in (100.0, 115.0, 130.0):
        made = generation([(2, 1)] * 6, RoundTiming(0.5, 1.5, 2.0))
        timings = (replace(made.timings[0], verifying=prefill + 1.5, total=prefill + 2.0), *made.timings[1:])
        made = replace(made, timings=timings, seconds=prefill + 12.0)
        figures = draft_figures([(made, target), (made, target)], 1.0)
        assert figures["verify_cost"] == pytest.approx(1.5) and figures["draft_cost"] == pytest.approx(0.25)


def test_drafts_of_a_chain_cost_what_their_drafter_kind_costs(view: Screen, tmp_path: Path) -> None:
    session = open_session(
        view, records=tmp_path / "records.jsonl", draft_seconds=lambda job: 0.5 * drafter_kind(job.drafter).uses_loaded
    )
    for line in ("/length 24", "/gamma 4", "/drafter_kind loaded chain suffix", "one two one two three", "/whatif"):
        assert session.handle(line) is Verdict.DONE, view.take()
    rows = records_of(tmp_path / "records.jsonl")[-1]["findings"]
    speeds = {row["drafter"]: row["tokens_per_second"] for row in rows if row["gamma"] == 4}
    # Where the suffix drafter declines, the model drafts.
    assert speeds["model"] <= speeds["chain"] < speeds["suffix"] / 10


def test_the_screen_and_the_record(view: Screen, tmp_path: Path) -> None:
    session = open_session(view, records=tmp_path / "records.jsonl")
    for line in ("/length 16", "/gamma 2", "Hello", "/why"):
        assert session.handle(line) is Verdict.DONE, view.take()
    shown = view.take()[0]
    assert all(words in shown for words in (*TABLE.headings, "speculative: ", "ngram: ", "/whatif"))
    report = records_of(tmp_path / "records.jsonl")[-1]
    rows = report["findings"]
    assert [row["strategy"] for row in rows] == ["speculative", "ngram"]
    for row in rows:
        assert min(row["seconds"].values()) >= 0 and row["bottleneck"]


def test_missing_runs_are_named(view: Screen) -> None:
    session = open_session(view, table_pair())
    assert session.handle("/why") is Verdict.FAILED and "prompt" in view.take()[1]
    for line in ("/speculative off", "/ngram off", "/length 4", "Hello"):
        session.handle(line)
    assert session.handle("/why") is Verdict.FAILED and "/speculative on" in view.take()[1]
    for line in ("/ngram on", "/target off", "Hello"):
        session.handle(line)
    assert session.handle("/why") is Verdict.FAILED and "/target on" in view.take()[1]
