"""The sentences that sum up the runs of a prompt."""

from dataclasses import replace

import pytest
from local_runs import compared_run, compared_with, local_run

from utils.comparison.speed_claims import ending, is_noise, rough, summary
from utils.comparison.strategies import STRATEGIES
from utils.decode.steps import FinishReason, Step
from utils.metrics.results import Comparison, Generation

ROWS = {row.name: row for row in STRATEGIES}
ROWS |= {f"speculative {kind}": replace(ROWS["speculative"], name=f"speculative {kind}") for kind in ("head", "lookup")}


def run_of(tokens: int, finish: FinishReason = FinishReason.LENGTH, token: int = 5) -> Generation:
    """One token per step and second."""
    return Generation((Step((), 0, token),) * tokens, float(tokens), 0.1, finish)


def drafting(factor: float, *, accepted: int = 20, rejected: int = 20, tokens: int = 60, token: int = 5) -> Generation:
    """A run that takes 1/factor of the target's time."""
    steps = [Step((token,), 1, token)] * accepted + [Step((0,), 0, token)] * rejected
    steps += [Step((), 0, token)] * (tokens - 2 * accepted - rejected)
    return Generation(tuple(steps), tokens / factor, 0.1, FinishReason.LENGTH)


def looks_like_noise(run: Generation, name: str = "ngram") -> bool:
    return is_noise(compared_with(local_run(ROWS[name], run), local_run(ROWS["target"], run_of(60))))


def said(*, planned: tuple[str, ...] = (), same: bool = True, **runs: Generation) -> str:
    named = {name.replace("_", " "): run for name, run in runs.items()}
    made = {name: local_run(ROWS[name], run) for name, run in named.items()}
    compared = [compared_with(run, made.get("target"), same_request=same) for run in made.values()]
    return summary(compared, [*named, *planned])


@pytest.mark.parametrize(
    ("finish", "words"),
    [
        (FinishReason.STOP, ()),
        (FinishReason.LENGTH, ("12", "/length")),
        (FinishReason.INTERRUPTED, ("interrupted",)),
    ],
)
def test_the_end_of_a_text_is_named_unless_it_ended_by_itself(finish: FinishReason, words: tuple[str, ...]) -> None:
    shown = ending(local_run(ROWS["target"], run_of(12, finish)), 12)
    assert all(word in shown for word in words) and bool(shown) == bool(words)


def test_a_text_that_filled_the_context_does_not_advise_a_longer_length() -> None:
    shown = ending(local_run(ROWS["target"], run_of(12)), 13)
    assert "/length" not in shown and "context" in shown


def test_one_run_that_was_faster_is_about_so_much_and_is_to_be_confirmed() -> None:
    text = said(speculative=drafting(1.42), target=run_of(60))
    assert "speculative was about 1.4x" in text and "the target's own" in text and "/race 5" in text
    assert "at most" not in text and "measured" not in text


@pytest.mark.parametrize("factor", [1.29, 1.0, 0.8])
def test_no_gain_is_claimed_where_no_draft_was_accepted(factor: float) -> None:
    """tokens per forward is 1.00: whatever was measured, drafts cannot have brought it."""
    run = drafting(factor, accepted=0)
    text = said(ngram=run, target=run_of(60))
    assert "faster" not in text and "1.3" not in text and "noise" in text and "/race" not in text
    assert looks_like_noise(run) is (factor > 1)


def test_a_gain_is_never_larger_than_the_accepted_drafts_explain() -> None:
    """1 of 18 drafts accepted and 1.23x measured: at most 1.02 tokens per forward."""
    run = drafting(1.23, accepted=1, rejected=17)
    assert "1.2" not in said(ngram=run, target=run_of(60)) and looks_like_noise(run)
    capped = drafting(2.5, accepted=20, rejected=0, tokens=60)
    text = said(ngram=capped, target=run_of(60))
    assert len(capped.tokens) == 1.5 * capped.target_forwards and "at most about 1.5x" in text
    assert "2.50x was measured, but 1.50 tokens per forward" in text, "the table has the measured one"
    assert not looks_like_noise(capped)


def test_the_speed_of_the_drafter_itself_is_no_noise() -> None:
    """It accepts no drafts, because it verifies none."""
    fast = replace(run_of(60, token=6), seconds=10.0)
    assert not looks_like_noise(drafting(1.002, accepted=0)), "it is 1.00x in the table"
    assert looks_like_noise(fast) and not any(looks_like_noise(fast, name) for name in ("drafter", "beam"))


def test_others_without_an_accepted_draft_are_named_beside_the_winner() -> None:
    text = said(speculative=drafting(1.4), ngram=drafting(1.11, accepted=0), target=run_of(60))
    assert text.startswith("speculative was about 1.4x") and "ngram: no draft was accepted" in text
    text = said(speculative=drafting(1.4), ngram=run_of(60), target=run_of(60))
    assert "ngram: no draft was accepted" in text


def test_the_fastest_of_several_drafters_is_named() -> None:
    text = said(speculative_head=drafting(1.2), speculative_lookup=drafting(1.4), target=run_of(60))
    assert text.startswith("speculative lookup was about 1.4x")
    alone = said(speculative_head=drafting(0.8), speculative_lookup=drafting(1.4), target=run_of(60))
    assert alone.startswith("speculative lookup was about 1.4x")


@pytest.mark.parametrize(("factor", "word"), [(1.01, "as fast as"), (0.97, "as fast as"), (0.6, "about 0.6x")])
def test_no_winner_is_named_where_there_is_none(factor: float, word: str) -> None:
    text = said(speculative=drafting(factor), target=run_of(60))
    assert word in text and "1.0x" not in text and "/race 5 checks" not in text
    several = said(speculative=drafting(factor), ngram=drafting(factor - 0.01), target=run_of(60))
    assert word in several and "1.0x" not in several and "/race 5 checks" not in several


def test_texts_that_differ_are_named() -> None:
    text = said(speculative=drafting(1.4, token=6), ngram=drafting(1.1), target=run_of(60))
    assert "the text of speculative is not the target's own; /race 5" in text


def test_texts_of_different_requests_are_not_compared() -> None:
    text = said(speculative=drafting(1.4), target=run_of(60), same=False)
    assert "about 1.4x" in text and "target's own" not in text and "differs" not in text


def test_without_a_finished_target_nothing_is_compared() -> None:
    assert "/target on" in said(speculative=drafting(1.4))
    assert "/target on" in said(drafter=run_of(60))
    for runs in ({"speculative": drafting(1.4)}, {"target": run_of(9, FinishReason.INTERRUPTED)}):
        text = said(planned=("target",), **runs)
        assert "did not finish" in text and "1.4" not in text and "/target on" not in text


def test_the_target_alone_advises_drafts() -> None:
    assert "/speculative on" in said(target=run_of(60))
    assert "/speculative on" in said(target=run_of(60), drafter=run_of(60, token=6), beam=run_of(60))


def test_runs_without_tokens_are_not_praised() -> None:
    assert said(speculative=run_of(0), target=run_of(0)).startswith("No token")
    assert summary([], ["target"]) == ""


def test_a_comparison_without_a_speed_is_no_rival() -> None:
    empty = compared_run(ROWS["speculative"], drafting(1.4), Comparison())
    target = compared_run(ROWS["target"], run_of(60), Comparison(1.0, same=True))
    assert "1.4" not in summary([empty, target], ["speculative", "target"])


def test_small_gains_have_a_second_decimal() -> None:
    assert [rough(factor) for factor in (1.05, 1.1, 1.14, 2.04, 0.97, 0.55)] == [
        *("1.05x", "1.1x", "1.1x", "2.0x", "0.97x", "0.6x"),
    ]
    text = said(target=run_of(60), speculative=drafting(1.06, accepted=20))
    assert "speculative was about 1.06x as fast" in text
