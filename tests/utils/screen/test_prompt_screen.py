"""The screen after a prompt: one text in full, what differs in the others, rounds, progress, and a table that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import Screen, open_session, screen
from local_runs import arm_of, compared_with, local_run
from terminal import Terminal
from tiny import tiny_tokenizer

from utils.comparison.arms import Run
from utils.comparison.strategies import STRATEGIES
from utils.config.settings import Settings
from utils.decode.steps import FinishReason, Step
from utils.metrics.results import Generation, collect
from utils.repl.repl_session import Verdict
from utils.screen.run_view import PromptView, RunView, show_table

TOKENIZER = tiny_tokenizer()
ROWS = {row.name: row for row in STRATEGIES}


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False).input_ids)


def plain(text: str) -> list[Step]:
    return [Step((), 0, token) for token in ids(text)]


def drafted(text: str) -> list[Step]:
    """Rounds of one accepted draft and one bonus token."""
    tokens = ids(text)
    return [Step((first,), 1, second) for first, second in zip(tokens[::2], tokens[1::2], strict=True)]


def shown(view: Screen, *, debug: str = "off", **texts: list[Step]) -> str:
    """The results on the screen after these runs."""
    prompt = PromptView(view.renderer, TOKENIZER, Settings(debug=debug))
    for name, steps in texts.items():
        run_view = RunView(prompt, arm_of(ROWS[name]))
        run_view.end(local_run(ROWS[name], collect(iter(steps), run_view.step)))
    results, _ = view.take()
    return results


def test_a_text_that_is_on_the_screen_is_not_repeated(view: Screen) -> None:
    text = "The sea is blue..."
    result = shown(view, speculative=drafted(text), ngram=plain(text), target=plain(text))
    assert result.count(text.strip()) == 1 and result.count("= same text") == 2


def test_a_text_that_differs_is_shown_from_the_difference_on(view: Screen) -> None:
    first = "Once upon a time there was a king who liked to read. The end."
    other = "Once upon a time there was a king who liked to sleep.\nThe end."
    result = shown(view, speculative=plain(first), ngram=plain(first), target=plain(other), drafter=plain(other))
    second = result[result.index("Target only") :]
    position = next(index for index, (a, b) in enumerate(zip(ids(first), ids(other), strict=False)) if a != b)
    assert f"differs from token {position + 1}: ... there was a king who liked to sleep.\nThe end." in second
    assert "Once" not in second and second.count("sleep") == 1 and "same text as target" in second


def test_texts_are_compared_by_their_tokens(view: Screen) -> None:
    """Different tokens may read the same."""
    whole, letters = ids("hello"), [token for letter in "hello" for token in ids(letter)]
    if whole == letters:
        whole = [*letters, TOKENIZER.eos_token_id]  # shows as nothing
    runs = [[Step((), 0, token) for token in tokens] for tokens in (letters, whole)]
    result = shown(view, speculative=runs[0], target=runs[1])
    assert "= same text" not in result and ("reads the same" in result or "longer" in result)


def test_a_strategy_that_failed_has_its_title_above_its_error(view: Screen) -> None:
    prompt = PromptView(view.renderer, TOKENIZER, Settings())
    for name in ("speculative", "ngram"):
        RunView(prompt, arm_of(ROWS[name])).failed()
        assert view.take()[0].count(ROWS[name].title) == 1
        run_view = RunView(prompt, arm_of(ROWS["target"]))
        run_view.end(local_run(ROWS["target"], collect(iter(plain("abc")), run_view.step)))
        view.take()


def test_a_text_that_ends_earlier_says_so(view: Screen) -> None:
    result = shown(view, speculative=plain("one two three"), ngram=plain("one two"))
    assert f"up to token {len(ids('one two'))}" in result


def test_accepted_drafts_are_coloured_and_explained_once() -> None:
    view = screen(colour=True)
    first = shown(view, speculative=drafted("abab"))
    assert all(f"\x1b[1m\x1b[32m{letter}\x1b[0m" in first for letter in "a") and "accepted" in first
    again = shown(view, speculative=drafted("abab"))
    assert "that the target accepted" in first and "that the target accepted" not in again
    unmarked = screen(colour=True)
    assert "that the target accepted" not in shown(unmarked, target=plain("abab"))
    without = screen()
    result = shown(without, speculative=drafted("abab"))
    assert "\x1b" not in result and "that the target accepted" not in result and "abab" in result


def test_a_run_shows_how_far_it_has_got_on_a_terminal_only() -> None:
    view = screen(colour=True)
    prompt = PromptView(view.renderer, TOKENIZER, Settings())
    for name in ("speculative", "ngram"):
        run_view = RunView(prompt, arm_of(ROWS[name]))
        steps = plain("abcd")
        for step in steps:
            run_view.step(step, None)
        messages = Terminal(view.messages.getvalue()).lines[-1]
        assert name in messages if name == "ngram" else messages == ""
        run_view.end(local_run(ROWS[name], Generation(tuple(steps), 1.0, 0.1, FinishReason.STOP)))
        assert Terminal(view.messages.getvalue()).lines == [""]
    piped = screen()
    shown(piped, speculative=plain("abcd"), ngram=plain("abcd"))
    assert piped.take() == ("", "")


@pytest.mark.parametrize(
    ("tokens", "words"),
    [([], "text, 0 tokens)"), (["<eos>"] * 3, "(no visible text, 3 tokens)"), (["\n"], "text, 1 token)")],
)
def test_a_text_without_content_says_so(tokens: list[str], words: str, view: Screen) -> None:
    numbers = [TOKENIZER.eos_token_id if token == "<eos>" else ids(token)[0] for token in tokens]
    assert words in shown(view, target=[Step((), 0, token) for token in numbers])


def test_debug_full_repeats_the_text_of_every_strategy_with_its_drafts() -> None:
    view = screen(colour=True)
    text = "abab"
    result = shown(view, debug="full", speculative=drafted(text), ngram=drafted(text), target=plain(text))
    painted = "".join("\x1b[1m\x1b[32ma\x1b[0mb" for _ in range(2))
    assert result.count(painted) == 2 and result.count("= same text") == 1


def test_a_session_shows_one_text_a_table_and_one_sentence(view: Screen) -> None:
    session = open_session(view)
    assert session.handle("Hello") is Verdict.DONE
    results = view.take()[0]
    assert results.count("= same text") == 2 and results.count("tokens/s") >= 1
    assert "/" in results.splitlines()[-1] and "speculative" in results[results.index("strategy") :]


def run_of(name: str, generation: Generation) -> Run:
    kind = "speculative" if name.startswith("speculative") else name
    return local_run(replace(ROWS[kind], name=name), generation)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_table_fits_and_keeps_the_important_columns(width: int) -> None:
    target = run_of("target", Generation(tuple(plain("abcdefgh" * 16)), 1.5, 0.1, FinishReason.LENGTH))
    steps = drafted("abcdefgh" * 15)
    runs = [
        compared_with(run, target)
        for run in (
            run_of("speculative lookup", Generation(tuple(steps), 1.0, 0.1, FinishReason.LENGTH)),
            run_of("speculative layers:12", Generation(tuple(steps[1:]), 1.0, 0.1, FinishReason.LENGTH)),
            target,
        )
    ]
    view = screen(width=width)
    show_table(view.renderer, runs)
    table = view.take()[0]
    assert max(map(len, table.splitlines())) <= width
    for word in ("tokens/s", "speed-up", "tokens/", "forward", "text", "1.00x", "2.00", "differs"):
        assert word in table, word
    assert ("acceptance" in table) is (width >= 80)


def test_a_speed_up_without_accepted_drafts_is_not_in_the_table(view: Screen) -> None:
    target = run_of("target", Generation(tuple(plain("abcdefgh")), 1.0, 0.1, FinishReason.LENGTH))
    rejected: Any = [replace(step, drafted=(0,)) for step in plain("abcdefgh")]
    runs = [
        compared_with(run_of("ngram", run), target)
        for run in (Generation(tuple(rejected), seconds, 0.1, FinishReason.LENGTH) for seconds in (0.8, 1.25))
    ]
    show_table(view.renderer, runs)
    first, second = view.take()[0].splitlines()[-2:]
    assert "noise" in first and "1.25x" not in first and "0.80x" in second
