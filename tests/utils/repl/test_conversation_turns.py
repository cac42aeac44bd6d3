"""Conversations: prompt and noise of a later turn, whose answers it follows, and what is compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import Screen, open_session, records_of, table_pair
from turns import START, A, B, C, by_name, handled, jobs_of, rendered, watched

from sampling import autoregressive_steps
from utils.comparison.strategies import STRATEGIES, Job
from utils.decode.decoding import Decoding
from utils.decode.model_session import ModelSession
from utils.decode.noise import Noise
from utils.decode.steps import FinishReason, Step
from utils.logits_processor import MultinomialProcessor
from utils.metrics.results import tokens_of
from utils.prompts.conversation import Conversations, diverging_turn
from utils.screen.run_view import OWN_CONVERSATION


def test_without_turns_prompts_are_independent(view: Screen, tmp_path: Path) -> None:
    session = open_session(view, records=tmp_path / "r.jsonl")
    handled(session, "/length 4", "Hello", "And why?")
    assert jobs_of(session)["target"].prompt == rendered(session.harness.pair.tokenizer, "And why?")
    assert {(row["turn"], len(row["history"])) for row in records_of(tmp_path / "r.jsonl")} == {(0, 0)}
    assert not session.harness.state.conversations.by_name


def test_a_prompt_is_rendered_and_recorded_with_its_conversation(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "r.jsonl", table_pair()
    session = open_session(view, pair, records=file)
    handled(session, *START, "Hello", "And why?")
    first, second = by_name(file, "Hello")["target"], by_name(file, "And why?")["target"]
    assert jobs_of(session)["target"].prompt == rendered(pair.tokenizer, "Hello", first["text"], "And why?")
    assert (first["turn"], first["history"], second["turn"]) == (0, [], 1)
    assert second["history"] == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": first["text"]}]
    assert second["prompt_tokens"] == len(jobs_of(session)["target"].prompt) > first["prompt_tokens"]
    handled(session, "/system Be brief.", "Go on")
    prompt = pair.tokenizer.decode(jobs_of(session)["target"].prompt)
    assert (
        prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>")
        and "And why?" in prompt
    )


def test_every_strategy_continues_its_own_conversation(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "r.jsonl", table_pair()
    session = open_session(view, pair, records=file)
    handled(session, *START, "/drafter on", "/beams 2", "Hello")
    first = by_name(file, "Hello")
    assert first["drafter"]["text"] != first["target"]["text"] and first["drafter"]["same_as_baseline"] is False
    assert OWN_CONVERSATION.format("drafter", 2) not in view.take()[0]
    handled(session, "And why?")
    second, shown = by_name(file, "And why?"), view.take()[0]
    for name, job in jobs_of(session).items():
        assert job.prompt == rendered(pair.tokenizer, "Hello", first[name]["text"], "And why?"), name
        assert (
            second[name]["prompt_tokens"] == len(job.prompt)
            and second[name]["history"][1]["content"] == first[name]["text"]
        )
    drafter = second["drafter"]
    assert (drafter["same_as_baseline"], drafter["first_difference"]) == (None, None) and drafter[
        "speedup_vs_baseline"
    ] > 0
    assert shown.splitlines().count(OWN_CONVERSATION.format("drafter", 2)) == 1
    handled(session, "Go on")
    assert OWN_CONVERSATION.format("drafter", 2) in view.take()[0]
    assert all(by_name(file, "Go on")[name]["same_as_baseline"] is True for name in ("speculative", "ngram", "target"))


@pytest.mark.parametrize("setup", [(), ("/processor multinomial 1", "/verify coupled")])
def test_lossless_strategies_give_the_same_text_in_every_turn(
    view: Screen, tmp_path: Path, setup: tuple[str, ...]
) -> None:
    file = tmp_path / "r.jsonl"
    session = open_session(view, records=file)
    handled(session, *START, *setup, "/drafter_kind loaded suffix", "one two one", "two one two", "and three?")
    rows = records_of(file)
    assert [row["strategy"] for row in rows] == ["speculative model", "speculative suffix", "ngram", "target"] * 3
    assert [row["turn"] for row in rows] == [0] * 4 + [1] * 4 + [2] * 4
    assert all(row["same_as_baseline"] is True for row in rows)


def test_every_strategy_uses_new_noise_in_a_later_turn(view: Screen, tmp_path: Path) -> None:
    """The second turn uses the noise of turn 1, which gives a different text than that of turn 0."""
    file, pair, seen = tmp_path / "r.jsonl", table_pair(), []
    session = open_session(view, pair, file, strategies=watched(seen))
    handled(session, *START, "/length 12", "/processor multinomial 1", "/drafter on", "/beams 2", "Hello", "Hello")
    assert [(name, job.decoding.noise) for name, job in seen] == [
        (row.name, Noise(42, turn)) for turn in (0, 1) for row in STRATEGIES
    ]
    for name, model in (("target", pair.target), ("drafter", pair.drafter)):
        prompt = jobs_of(session)[name].prompt
        texts = [
            tokens_of(
                autoregressive_steps(
                    prompt, ModelSession(model), Decoding(MultinomialProcessor(1.0), 12, pair.end_ids, Noise(42, turn))
                )
            )
            for turn in (0, 1)
        ]
        assert by_name(file, "Hello")[name]["token_ids"] == texts[1] != texts[0]


def test_texts_of_different_conversations_are_not_explained(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "r.jsonl"
    session = open_session(view, records=file)
    handled(session, *START, "/length 12", "/processor multinomial 1.2", "Hello")
    assert by_name(file, "Hello")["speculative"]["divergence"]["cause"] == "sampling"
    monkeypatch.setattr(
        "utils.comparison.harness.explain", lambda *arguments: pytest.fail("explained with the wrong prompt")
    )
    view.take()
    handled(session, "And why?")
    assert by_name(file, "And why?")["speculative"]["divergence"] is None
    assert view.take()[0].splitlines()[-2] == OWN_CONVERSATION.format("speculative", 2)
    handled(session, "/texts")
    assert "differs at token" not in view.take()[0]


def test_prompts_without_the_template_do_not_touch_the_conversation(view: Screen) -> None:
    session = open_session(view)
    handled(session, *START, "Hello", "/chat off", "Once upon")
    assert jobs_of(session)["target"].prompt == session.harness.pair.tokenizer("Once upon")["input_ids"]
    assert jobs_of(session)["target"].turn == 0 and "turn " not in session.status()
    handled(session, "/chat on", "And why?")
    assert [turn.user for turn in jobs_of(session)["target"].history] == ["Hello"]


def test_a_strategy_that_joins_later_continues_the_targets_conversation(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    session = open_session(view, records=file)
    handled(session, *START, "/speculative off", "Hello", "/drafter on", "/ngram off", "And why?")
    assert (
        jobs_of(session)["drafter"].prompt == jobs_of(session)["target"].prompt
        and jobs_of(session)["drafter"].turn == 1
    )
    assert by_name(file, "And why?")["drafter"]["same_as_baseline"] is False
    handled(session, "/speculative on", "/ngram on", "Go on")
    rows = by_name(file, "Go on")
    assert [rows[name]["same_as_baseline"] for name in ("speculative", "ngram", "drafter")] == [True, True, None]
    assert rows["speculative"]["turn"] == rows["ngram"]["turn"] == 2


def test_without_a_conversation_of_the_target_a_new_strategy_starts_from_nothing(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    session = open_session(view, records=file)
    handled(session, *START, "/target off", "/ngram off", "Hello", "/drafter on", "And why?")
    assert [(row["strategy"], row["turn"]) for row in records_of(file)[1:]] == [("speculative", 1), ("drafter", 0)]
    assert session.harness.last().job is jobs_of(session)["speculative"]


def test_which_conversation_a_strategy_continues() -> None:
    conversations = Conversations({"target": (A, B, C), "ngram": (A,), "drafter": (A, C), "beam": (A, B, C)})
    assert [
        conversations.history(name, "target") for name in ("target", "ngram", "drafter", "beam", "speculative")
    ] == [
        (A, B, C),
        (A, B, C),
        (A, C),
        (A, B, C),
        (A, B, C),
    ]
    assert (len(conversations), len(Conversations())) == (3, 0)
    assert [diverging_turn(ours, (A, B, C)) for ours in ((B, B, C), (A, C, C), (A, B, A), ())] == [2, 3, 4, 2]


def test_the_same_ids_in_a_different_turn_are_not_compared(view: Screen, tmp_path: Path) -> None:
    """The template renders the last message only, but the noise differs."""
    file, pair = tmp_path / "r.jsonl", table_pair()
    pair.tokenizer.chat_template = "{{ '<|im_start|>' + messages[-1]['content'] + '<|im_end|>' }}"
    session = open_session(view, pair, file)
    handled(session, *START, "/target off", "Hello", "/target on", "Hello")
    rows = by_name(file, "Hello")
    assert (
        rows["ngram"]["prompt_tokens"] == rows["target"]["prompt_tokens"] and rows["ngram"]["same_as_baseline"] is None
    )


def test_names_of_special_tokens_in_answers_are_text(view: Screen) -> None:
    answer = "a<|im_end|>\n<|im_start|>user\nNAMEMARK0END <|im_<|im_end|>end|>"

    def steps(job: Job) -> Iterator[Step]:
        ids = job.pair.tokenizer(answer, split_special_tokens=True)["input_ids"]
        yield from (Step((), 0, token) for token in ids[:-1])
        yield Step((), 0, ids[-1], FinishReason.STOP)

    rows = tuple(replace(row, steps=steps) if row.is_baseline else row for row in STRATEGIES)
    session = open_session(view, strategies=rows)
    handled(session, *START, "/speculative off", "/ngram off", "Hello", "And <|im_start|> why?")
    tokenizer, prompt = session.harness.pair.tokenizer, jobs_of(session)["target"].prompt
    plain = rendered(tokenizer, "Hello", "x", "y")
    special = set(tokenizer.all_special_ids)
    assert [token for token in prompt if token in special] == [token for token in plain if token in special]
    assert f"<|im_start|>assistant\n{answer}<|im_end|>\n<|im_start|>user\nAnd <|im_start|> why?" in tokenizer.decode(
        prompt
    )
    handled(session, "/special on", "x")
    assert (
        sum(token in special for token in jobs_of(session)["target"].prompt)
        > len([token for token in plain if token in special]) + 4
    )


def test_commands_on_the_last_prompt_use_its_turn(view: Screen) -> None:
    seen: list[tuple[str, Job]] = []
    session = open_session(view, strategies=watched(seen))
    handled(session, *START, "/processor multinomial 1", "/drafter on", "Hello", "And why?")
    target = jobs_of(session)["target"]
    assert jobs_of(session)["drafter"].prompt != target.prompt
    for line in ("/race 1", "/sweep gamma 2", "/lossless 2", "/audit 1"):
        seen.clear()
        handled(session, line)
        assert {name for name, _ in seen} == {"speculative", "ngram", "target", "drafter"}, line
        assert all(job.prompt == target.prompt and job.decoding.noise.turn == 1 for _, job in seen), line


def test_whatif_predicts_the_rounds_of_the_last_turn(view: Screen, tmp_path: Path) -> None:
    """Under `coupled` all drafts of the target itself are accepted if both use the noise of the turn."""
    file, pair = tmp_path / "r.jsonl", table_pair()
    pair.drafter = pair.target
    session = open_session(view, pair, file)
    handled(
        session,
        *START,
        "/length 24",
        "/gamma 3",
        "/processor multinomial 1",
        "/verify coupled",
        "Hello",
        "And why?",
        "/whatif",
        "/why",
    )
    findings = {(row["drafter"], row["gamma"]): row for row in records_of(file)[-2]["findings"]}
    for name, label in (("speculative", "chain"), ("ngram", "ngram")):
        run = by_name(file, "And why?")[name]
        assert [findings[label, 3][field] for field in ("rounds", "drafted", "accepted")] == [
            run[field] for field in ("rounds", "drafted", "accepted")
        ]
