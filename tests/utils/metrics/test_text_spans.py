"""Drafts by kind of text: copied or new, thinking or answer, code or prose, against hand-computed examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, open_session, records_of
from tiny import tiny_tokenizer

from utils.commands import whatif
from utils.comparison import records
from utils.decode.steps import FinishReason, Step
from utils.metrics.results import spans_of
from utils.repl.repl_session import Verdict

TOKENIZER: Any = tiny_tokenizer()  # a token for each byte


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def steps_of(text: str, rounds: list[tuple[int, int]]) -> list[Step]:
    """Rounds of (drafted, accepted) that make this text. Rejected drafts are other tokens."""
    tokens, steps = ids(text), []
    for drafted, accepted in rounds:
        kept, tokens = tokens[:accepted], tokens[accepted:]
        token, tokens = (tokens[0], tokens[1:]) if tokens else (None, [])
        steps.append(Step((*kept, *[0] * (drafted - accepted)), accepted, token))
    assert not tokens
    return steps


def test_copied_tokens_end_four_known_tokens() -> None:
    """ "bcdef" repeats the prompt from its fourth token on: only "e" and "f" end four tokens of the prompt."""
    steps = steps_of("xbcdef", [(2, 1), (2, 2), (3, 0)])
    # Positions x b | c d e | f: the drafts of the rounds are at x b, c d and, with two beyond the end, f f f.
    assert spans_of(ids("abcdefg"), steps, TOKENIZER) == {"copied": [0, 3], "new": [3, 4]}
    assert spans_of(ids("abcd"), steps_of("xbcdef", [(2, 1), (3, 3)]), TOKENIZER) == {}


def test_the_answer_itself_is_text_to_copy() -> None:
    steps = steps_of("abcdabcd", [(3, 3), (4, 3)])
    # The last "d" ends a copy of the first four tokens. It is the fourth draft's position, and that draft is rejected.
    assert spans_of(ids("x"), steps, TOKENIZER) == {"copied": [0, 1], "new": [6, 6]}
    # The prompt's end belongs to an n-gram: "d" behind "abc" of the prompt.
    assert spans_of(ids("abcd abc"), steps_of("d", [(1, 0)]), TOKENIZER) == {"copied": [0, 1]}


def test_thinking_and_the_answer() -> None:
    text = "<think>ab</think>cd"  # 7 + 2 + 8 tokens of thinking, with the marks
    steps = steps_of(text, [(8, 8), (8, 7), (1, 1)])
    # Of the second mark, "n", "k" and ">" end four tokens of the first one. The last of them is rejected.
    copied = {"copied": [2, 3], "new": [14, 14]}
    assert spans_of(ids("p"), steps, TOKENIZER) == copied | {"thinking": [15, 16], "answer": [1, 1]}
    steps = steps_of("ab</think>cd", [(9, 9), (2, 1)])
    assert spans_of(ids("p"), steps, TOKENIZER) == {}, "no reasoning was opened"
    copied = {"copied": [2, 2], "new": [8, 9]}
    assert spans_of(ids("p<think>\n"), steps, TOKENIZER) == copied | {"thinking": [9, 9], "answer": [1, 2]}
    closed = spans_of(ids("<think>\n\n</think>\n"), steps, TOKENIZER)
    assert "thinking" not in closed, "a template may end the reasoning itself"
    unfinished = spans_of(ids("p"), steps_of("<think>ab", [(8, 8)]), TOKENIZER)
    assert unfinished == {"thinking": [8, 8]}, "kinds that do not occur are left out"


def test_code_and_prose() -> None:
    text = "a\n```x\nb```\n```\ncd"  # a fence begins a line, so the first marks of the third line do not end it
    steps = steps_of(text, [(1, 1), (13, 12), (2, 1), (0, 0)])
    # Tokens 2 to 14 are code, and the drafts are at 0 | 2 to 14 | 15 and 16. Those at 14 and 16 are rejected. The last
    # marks repeat "\n```", and then "```\n", so tokens 14 and 15 are copied.
    copied = {"copied": [1, 2], "new": [13, 14]}
    assert spans_of(ids("p"), steps, TOKENIZER) == copied | {"code": [12, 13], "prose": [2, 3]}
    item = spans_of(ids("p"), steps_of("1. ```x\n ```\nabcd", [(17, 17)]), TOKENIZER)
    assert item["code"] == [12, 12] and item["prose"] == [5, 5]
    both = spans_of(ids("p"), steps_of("<think>\n```\nx", [(12, 12)]), TOKENIZER)
    assert both == {"thinking": [12, 12], "code": [4, 4], "prose": [8, 8]}, "marks that do not end"


def test_the_sums_are_those_of_the_run() -> None:
    steps = [Step((1, 2, 3), 3, None, FinishReason.STOP)]
    assert spans_of([1, 2, 3, 4, 1, 2], steps, TOKENIZER) == {} == spans_of([1], [], TOKENIZER)
    rounds = [(4, 2), (0, 0), (3, 3), (5, 0), (2, 1)]
    for text in ("aaaaaaaaaaa", "<think></b>", "```\na\n```\nb"):
        for counts in _pairs(spans_of(ids("aaaa"), steps_of(text, rounds), TOKENIZER)):
            assert [sum(column) for column in zip(*counts, strict=True)] == [6, 14], text


def _pairs(spans: dict[str, list[int]]) -> list[list[list[int]]]:
    pairs = (("copied", "new"), ("thinking", "answer"), ("code", "prose"))
    return [found for names in pairs if (found := [spans[name] for name in names if name in spans])]


@pytest.mark.parametrize("strategy", ["speculative", "ngram"])
def test_why_and_the_records_have_them(strategy: str, view: Screen, tmp_path: Path) -> None:
    session = open_session(view, records=tmp_path / "records.jsonl")
    for line in ("/length 24", "one two one two three", "/why"):
        assert session.handle(line) is Verdict.DONE, view.take()
    shown = view.take()[0]
    *runs, report = records_of(tmp_path / "records.jsonl")
    run = next(one for one in runs if one["strategy"] == strategy)
    row = next(one for one in report["findings"] if one["strategy"] == strategy)
    spans = run["accepted_by_span"]
    assert spans == row["accepted_by_span"]
    for counts in _pairs(spans):
        assert [sum(column) for column in zip(*counts, strict=True)] == [run["accepted"], run["drafted"]]
    target = next(one for one in runs if one["strategy"] == "target")
    assert target["accepted_by_span"] is None
    kinds = {kind for one in report["findings"] for kind in one["accepted_by_span"]}
    assert all(
        (f"{kind} " in shown.partition("by kind of text")[2]) == (kind in kinds) for kind in ("copied", "thinking")
    )


def test_the_prompt_is_text_to_copy(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def noted(prompt: list[int], steps: Any, tokenizer: Any) -> dict[str, list[int]]:
        seen.append(prompt)
        return spans_of(prompt, steps, tokenizer)

    for module in (records, whatif):
        monkeypatch.setattr(module, "spans_of", noted)
    session = open_session(view, records=tmp_path / "records.jsonl")
    for line in ("Hello", "/why"):
        assert session.handle(line) is Verdict.DONE, view.take()
    assert len(seen) == 4 and all(prompt == session.harness.prompt_ids("Hello", session.settings) for prompt in seen)
