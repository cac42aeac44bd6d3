"""Conversations: what is asked in a later turn and with which noise, whose words it goes on from, what is compared, kept and forgotten."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import Screen, records_of, tiny_pair, workbench

import infer
from sampling import autoregressive_steps
from utils.commands.experiments import divergence
from utils.comparison.reports import Finding
from utils.comparison.strategies import Job, Strategy
from utils.decode.decoding import Decoding
from utils.decode.model_session import ModelSession
from utils.decode.noise import Noise
from utils.decode.steps import FinishReason, Step
from utils.errors import UserError
from utils.logits_processor import MultinomialProcessor
from utils.metrics.divergence import Cause
from utils.metrics.results import tokens_of
from utils.prompts.chat_template import prompt_ids
from utils.prompts.conversation import Conversations, Turn, own_since
from utils.repl.repl_session import Workbench
from utils.repl.runner import Verdict

START = ("/turns on", "/length 6")
A, B, C = Turn("a", "1"), Turn("b", "2"), Turn("c", "3")


def handled(bench: Workbench, *lines: str) -> None:
    for line in lines:
        assert bench.handle(line) is Verdict.DONE, line


def rendered(tokenizer: Any, *contents: str) -> list[int]:
    """The template's own words over contents of the user and the assistant in turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def jobs_of(bench: Workbench) -> dict[str, Job]:
    return dict(bench._bench.last().jobs)


def by_name(file: Path, prompt: str) -> dict[str, dict[str, Any]]:
    """The latest records of a prompt."""
    return {
        row["strategy"]: row
        for row in records_of(file)
        if row.get("prompt") == prompt and row["record"] == "generation"
    }


def watched(seen: list[tuple[str, Job]]) -> tuple[Strategy, ...]:
    """The table of strategies, each of which notes what it is asked."""

    def steps(row: Strategy, job: Job) -> Iterator[Step]:
        seen.append((row.name, job))
        return row.steps(job)

    return tuple(replace(row, steps=partial(steps, row)) for row in infer.STRATEGIES)


def test_without_turns_every_prompt_stands_alone(view: Screen, tmp_path: Path) -> None:
    bench = workbench(view, records=tmp_path / "r.jsonl")
    handled(bench, "/length 4", "Hello", "And why?")
    assert jobs_of(bench)["target"].prompt == rendered(bench._bench.pair.tokenizer, "And why?")
    assert {(row["turn"], len(row["history"])) for row in records_of(tmp_path / "r.jsonl")} == {(0, 0)}
    assert not bench._bench.memory.conversations.by_name


def test_a_prompt_is_rendered_over_the_conversation_and_recorded_with_it(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "r.jsonl", tiny_pair()
    bench = workbench(view, pair, records=file)
    handled(bench, *START, "Hello", "And why?")
    first, second = by_name(file, "Hello")["target"], by_name(file, "And why?")["target"]
    assert jobs_of(bench)["target"].prompt == rendered(pair.tokenizer, "Hello", first["text"], "And why?")
    assert (first["turn"], first["history"], second["turn"]) == (0, [], 1)
    assert second["history"] == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": first["text"]}]
    assert second["prompt_tokens"] == len(jobs_of(bench)["target"].prompt) > first["prompt_tokens"]
    handled(bench, "/system Be brief.", "Go on")
    asked = pair.tokenizer.decode(jobs_of(bench)["target"].prompt)
    assert (
        asked.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>")
        and "And why?" in asked
    )


def test_every_strategy_goes_on_with_its_own_words_and_others_are_not_compared(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "r.jsonl", tiny_pair()
    bench = workbench(view, pair, records=file)
    handled(bench, *START, "/drafter on", "/beams 2", "Hello")
    first = by_name(file, "Hello")
    assert first["drafter"]["text"] != first["target"]["text"] and first["drafter"]["same_as_target"] is False
    assert "conversation" not in view.take()[0]
    handled(bench, "And why?")
    second, shown = by_name(file, "And why?"), view.take()[0]
    for name, job in jobs_of(bench).items():
        assert job.prompt == rendered(pair.tokenizer, "Hello", first[name]["text"], "And why?"), name
        assert (
            second[name]["prompt_tokens"] == len(job.prompt)
            and second[name]["history"][1]["content"] == first[name]["text"]
        )
    drafter = second["drafter"]
    assert (drafter["same_as_target"], drafter["first_difference"]) == (None, None) and drafter["speedup_vs_target"] > 0
    assert shown.count("drafter: its conversation is its own since turn 2; its text is not compared\n") == 1
    handled(bench, "Go on")
    assert "drafter: its conversation is its own since turn 2; " in view.take()[0]
    assert all(by_name(file, "Go on")[name]["same_as_target"] is True for name in ("speculative", "ngram", "target"))


@pytest.mark.parametrize("setup", [(), ("/processor multinomial 1", "/verify coupled")])
def test_lossless_strategies_say_the_same_in_every_turn(view: Screen, tmp_path: Path, setup: tuple[str, ...]) -> None:
    file = tmp_path / "r.jsonl"
    bench = workbench(view, records=file)
    handled(bench, *START, *setup, "/drafter_kind loaded suffix", "one two one", "two one two", "and three?")
    rows = records_of(file)
    assert [row["strategy"] for row in rows] == ["speculative model", "speculative suffix", "ngram", "target"] * 3
    assert [row["turn"] for row in rows] == [0] * 4 + [1] * 4 + [2] * 4
    assert all(row["same_as_target"] is True for row in rows) and "its own" not in view.take()[0]


def test_a_later_turn_draws_other_numbers_by_every_strategy(view: Screen, tmp_path: Path) -> None:
    """The noise of the second turn is turn 1's, and it makes another text than turn 0's would have."""
    file, pair, seen = tmp_path / "r.jsonl", tiny_pair(), []
    bench = workbench(view, pair, file, strategies=watched(seen))
    handled(bench, *START, "/length 12", "/processor multinomial 1", "/drafter on", "/beams 2", "Hello", "Hello")
    assert [(name, job.decoding.noise) for name, job in seen] == [
        (row.name, Noise(42, turn)) for turn in (0, 1) for row in infer.STRATEGIES
    ]
    for name, model in (("target", pair.target), ("drafter", pair.drafter)):
        prompt = jobs_of(bench)[name].prompt
        texts = [
            tokens_of(
                autoregressive_steps(
                    prompt, ModelSession(model), Decoding(MultinomialProcessor(1.0), 12, pair.end_ids, Noise(42, turn))
                )
            )
            for turn in (0, 1)
        ]
        assert by_name(file, "Hello")[name]["token_ids"] == texts[1] != texts[0]


def test_texts_of_other_conversations_are_not_explained(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "r.jsonl"
    bench = workbench(view, records=file)
    handled(bench, *START, "/length 12", "/processor multinomial 1.2", "Hello")
    assert by_name(file, "Hello")["speculative"]["divergence"]["cause"] == "sampling"
    monkeypatch.setattr("utils.comparison.harness.explain", lambda *arguments: pytest.fail("with the wrong prompt"))
    view.take()
    handled(bench, "And why?")
    assert by_name(file, "And why?")["speculative"]["divergence"] is None
    assert (
        view.take()[0].splitlines()[-1]
        == "speculative: its conversation is its own since turn 2; its text is not compared"
    )
    handled(bench, "/divergence")
    assert view.take()[1] == "ngram: the same tokens as target-only.\n"
    unexplained = Finding((), {"cause": Cause.UNEXPLAINED})
    assert set(json.loads(divergence._replay(bench._bench.last(), [unexplained]))["rounds"]) == {"ngram"}
    handled(bench, "/ngram off", "Go on")
    assert bench.handle("/divergence") is Verdict.FAILED
    assert "the conversations are not the target's own; /reset begins new ones" in view.take()[1]


def test_reset_forgets_and_says_how_much(view: Screen) -> None:
    bench = workbench(view)
    handled(bench, "/reset")
    assert view.take()[1] == "there is no conversation to forget (/turns on goes on with what was said)\n"
    handled(bench, *START, "/reset", "Hello", "And why?")
    assert "there is no conversation to forget\n" in view.take()[1] and "| turn 2 |" in bench.status()
    handled(bench, "/reset")
    assert (
        view.take()[1] == "forgotten: 2 turns; the next prompt begins a conversation\n" and "turn" not in bench.status()
    )
    handled(bench, "Hello")
    assert (
        jobs_of(bench)["target"].prompt == rendered(bench._bench.pair.tokenizer, "Hello")
        and jobs_of(bench)["target"].turn == 0
    )


@pytest.mark.parametrize("line", ["/turns off", "/undo"])
def test_switching_turns_off_forgets_with_a_note(view: Screen, line: str) -> None:
    bench = workbench(view)
    handled(bench, "/length 4", "/turns on", "Hello")
    view.take()
    handled(bench, line)
    assert "The conversation is over: 1 turn forgotten.\n" in view.take()[1]
    handled(bench, "/turns on", "/turns off", "/turns on", "Hello")
    assert jobs_of(bench)["target"].turn == 0 and "over" not in view.take()[1]


def test_prompts_without_the_template_stand_beside_the_conversation(view: Screen) -> None:
    bench = workbench(view)
    handled(bench, *START, "Hello", "/chat off", "Once upon")
    assert jobs_of(bench)["target"].prompt == bench._bench.pair.tokenizer("Once upon")["input_ids"]
    assert jobs_of(bench)["target"].turn == 0 and "turn" not in bench.status()
    handled(bench, "/chat on", "And why?")
    assert [turn.user for turn in jobs_of(bench)["target"].history] == ["Hello"]


@pytest.mark.parametrize("build", [lambda: tiny_pair(kind="t5", chat=False), lambda: tiny_pair(chat=False)])
def test_without_a_template_it_has_no_effect_and_says_so(view: Screen, build: Any) -> None:
    bench = workbench(view, build())
    view.take()
    handled(bench, "/turns on")
    assert view.take()[1] == "turns: on   (no effect while /chat is off)\n"
    handled(bench, "/length 3", "Hello", "And why?")
    assert jobs_of(bench)["target"].turn == 0


@pytest.mark.parametrize(
    ("error", "verdict"), [(KeyboardInterrupt(), Verdict.INTERRUPTED), (UserError("no"), Verdict.FAILED)]
)
def test_a_turn_that_not_all_have_finished_is_kept_for_none(
    view: Screen, error: BaseException, verdict: Verdict
) -> None:
    broken = [False]

    def steps(row: Strategy, job: Job) -> Iterator[Step]:
        for step in row.steps(job):
            if broken[0]:
                raise error
            yield step

    rows = tuple(replace(row, steps=partial(steps, row)) if row.name == "ngram" else row for row in infer.STRATEGIES)
    bench = workbench(view, strategies=rows)
    handled(bench, *START, "Hello")
    assert "no part of the conversation" not in view.take()[1]
    broken[0] = True
    assert bench.handle("And why?") is verdict
    assert "This turn is no part of the conversation: not every strategy has finished it.\n" in view.take()[1]
    broken[0] = False
    handled(bench, "Go on")
    assert (
        all([turn.user for turn in job.history] == ["Hello"] for job in jobs_of(bench).values())
        and len(jobs_of(bench)) == 3
    )


def test_ctrl_c_behind_the_last_answer_keeps_nothing_either(view: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    bench = workbench(view)
    handled(bench, *START)
    monkeypatch.setattr(view.renderer, "comparison", interrupted)
    assert bench.handle("Hello") is Verdict.INTERRUPTED
    assert "no part of the conversation" in view.take()[1] and not bench._bench.memory.conversations.by_name


def test_who_joins_later_takes_over_the_targets_conversation(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    bench = workbench(view, records=file)
    handled(bench, *START, "/speculative off", "Hello", "/drafter on", "/ngram off", "And why?")
    assert jobs_of(bench)["drafter"].prompt == jobs_of(bench)["target"].prompt and jobs_of(bench)["drafter"].turn == 1
    assert by_name(file, "And why?")["drafter"]["same_as_target"] is False
    handled(bench, "/speculative on", "/ngram on", "Go on")
    rows = by_name(file, "Go on")
    assert [rows[name]["same_as_target"] for name in ("speculative", "ngram", "drafter")] == [True, True, None]
    assert rows["speculative"]["turn"] == rows["ngram"]["turn"] == 2


def test_where_the_target_has_none_it_begins_anew(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    bench = workbench(view, records=file)
    handled(bench, *START, "/target off", "/ngram off", "Hello", "/drafter on", "And why?")
    assert [(row["strategy"], row["turn"]) for row in records_of(file)[1:]] == [("speculative", 1), ("drafter", 0)]
    assert bench._bench.last().job is jobs_of(bench)["speculative"] and "its own" not in view.take()[0]


def test_whose_words_a_strategy_goes_on_from() -> None:
    said = Conversations({"target": (A, B, C), "ngram": (A,), "drafter": (A, C), "beam": (A, B, C)})
    assert [said.of(name, "target") for name in ("target", "ngram", "drafter", "beam", "speculative")] == [
        (A, B, C),
        (A, B, C),
        (A, C),
        (A, B, C),
        (A, B, C),
    ]
    assert (len(said), len(Conversations())) == (3, 0)
    assert [own_since(ours, (A, B, C)) for ours in ((B, B, C), (A, C, C), (A, B, A), ())] == [2, 3, 4, 2]


def test_same_ids_in_another_turn_are_not_compared(view: Screen, tmp_path: Path) -> None:
    """A template that shows the last message alone: the noise is another one."""
    file, pair = tmp_path / "r.jsonl", tiny_pair()
    pair.tokenizer.chat_template = "{{ '<|im_start|>' + messages[-1]['content'] + '<|im_end|>' }}"
    bench = workbench(view, pair, file)
    handled(bench, *START, "/target off", "Hello", "/target on", "Hello")
    rows = by_name(file, "Hello")
    assert rows["ngram"]["prompt_tokens"] == rows["target"]["prompt_tokens"] and rows["ngram"]["same_as_target"] is None


def test_names_of_special_tokens_in_answers_stay_text(view: Screen) -> None:
    said = "a<|im_end|>\n<|im_start|>user\nNAMEMARK0END <|im_<|im_end|>end|>"

    def steps(job: Job) -> Iterator[Step]:
        ids = job.pair.tokenizer(said, split_special_tokens=True)["input_ids"]
        yield from (Step((), 0, token) for token in ids[:-1])
        yield Step((), 0, ids[-1], FinishReason.STOP)

    rows = tuple(replace(row, steps=steps) if row.is_baseline else row for row in infer.STRATEGIES)
    bench = workbench(view, strategies=rows)
    handled(bench, *START, "/speculative off", "/ngram off", "Hello", "And <|im_start|> why?")
    tokenizer, prompt = bench._bench.pair.tokenizer, jobs_of(bench)["target"].prompt
    plain = rendered(tokenizer, "Hello", "x", "y")
    special = set(tokenizer.all_special_ids)
    assert [token for token in prompt if token in special] == [token for token in plain if token in special]
    assert f"<|im_start|>assistant\n{said}<|im_end|>\n<|im_start|>user\nAnd <|im_start|> why?" in tokenizer.decode(
        prompt
    )
    handled(bench, "/special on", "x")
    assert (
        sum(token in special for token in jobs_of(bench)["target"].prompt)
        > len([token for token in plain if token in special]) + 4
    )


def test_a_template_that_takes_no_second_turn_is_named() -> None:
    tokenizer = tiny_pair().tokenizer
    tokenizer.chat_template = (
        "{% if messages|length > 1 %}{{ raise_exception('one at a time {}') }}{% endif %}{{ messages[0]['content'] }}"
    )
    assert prompt_ids(tokenizer, "hi", chat=True, system=None)
    with pytest.raises(UserError, match=r"cannot render the conversation \(one at a time \{\}\).*/reset.*/turns off"):
        prompt_ids(tokenizer, "hi", chat=True, system=None, history=(A,))
    assert prompt_ids(tokenizer, "hi", chat=False, system=None, history=(A,)) == tokenizer("hi")["input_ids"]


def test_commands_that_go_back_to_the_last_prompt_mean_that_turns(view: Screen) -> None:
    seen: list[tuple[str, Job]] = []
    bench = workbench(view, strategies=watched(seen))
    handled(bench, *START, "/processor multinomial 1", "/drafter on", "Hello", "And why?")
    target = jobs_of(bench)["target"]
    assert jobs_of(bench)["drafter"].prompt != target.prompt
    for line in ("/race 1", "/sweep gamma 2", "/lossless 2", "/audit 1"):
        seen.clear()
        handled(bench, line)
        assert {name for name, _ in seen} == {"speculative", "ngram", "target", "drafter"}, line
        assert all(job.prompt == target.prompt and job.decoding.noise.turn == 1 for _, job in seen), line


def test_whatif_tells_the_rounds_of_the_last_turn(view: Screen, tmp_path: Path) -> None:
    """Under `coupled` a drafter that is the target itself is right, where it finds the turn's own numbers."""
    file, pair = tmp_path / "r.jsonl", tiny_pair()
    pair.drafter = pair.target
    bench = workbench(view, pair, file)
    handled(
        bench,
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
    found = {(row["drafter"], row["gamma"]): row for row in records_of(file)[-2]["findings"]}
    for name, label in (("speculative", "model"), ("ngram", "ngram")):
        run = by_name(file, "And why?")[name]
        assert [found[label, 3][field] for field in ("rounds", "drafted", "accepted")] == [
            run[field] for field in ("rounds", "drafted", "accepted")
        ]


def test_a_conversation_that_outgrows_the_context_is_refused_with_the_way_out(view: Screen) -> None:
    bench = workbench(view, tiny_pair(max_position_embeddings=90))
    handled(bench, "/length 4", "/turns on")
    assert bench.handle("x" * 80) is Verdict.FAILED
    assert "context of 90" in (said := view.take()[1]) and "/reset" not in said
    handled(bench, "x" * 20)
    assert bench.handle("y" * 20) is Verdict.FAILED
    said = view.take()[1]
    assert (
        said.endswith("a prompt may have at most 89. /reset forgets the conversation.\n") and "no part of" not in said
    )
    handled(bench, "/reset", "y" * 20)


def test_so_is_one_that_outgrows_the_drafters_own(view: Screen) -> None:
    pair = tiny_pair()
    pair.drafter = tiny_pair(max_position_embeddings=90).drafter
    bench = workbench(view, pair)
    handled(bench, "/length 4", "/turns on", "/drafter on", "x" * 20)
    view.take()
    assert bench.handle("y" * 20) is Verdict.FAILED
    said = view.take()[1]
    assert (
        "the drafter a context of 90" in said
        and "at most 89. /reset forgets the conversation." in said
        and "no part of" in said
    )


def test_other_models_begin_anew_with_a_note_and_a_load_that_fails_forgets_nothing(view: Screen) -> None:
    def load(request: Any, say: Any) -> SimpleNamespace:
        if "nowhere" in request.target:
            raise UserError("not there")
        return tiny_pair()

    bench = workbench(view, load=load)
    handled(bench, *START, "Hello", "And why?")
    assert bench.handle("/load target=nowhere") is Verdict.FAILED and "anew" not in view.take()[1]
    assert len(bench._bench.memory.conversations) == 2
    handled(bench, "/load target=there")
    assert "The conversation begins anew: 2 turns forgotten.\n" in view.take()[1] and bench.settings.turns
    handled(bench, "Hello", "/load target=there")
    handled(bench, "Hello")
    assert jobs_of(bench)["target"].turn == 0
