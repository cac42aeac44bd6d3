"""Notes on drafts against the models asked anew, where hits came from, and how they look."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import Screen, open_session, screen
from test_counterfactual import fresh, pair, strategy_of
from tiny import next_logits, tiny_llama, tiny_t5

from ngram_assisted import NGramDrafter, NGramStorage
from sampling import speculative_steps
from sampling.drafters.model import ModelDrafter
from sampling.verification import RULES
from utils.config.settings import Settings
from utils.decode.decoding import Decoding
from utils.decode.model_session import ModelSession
from utils.decode.steps import Step
from utils.logits_processor import GreedyProcessor, MultinomialProcessor, TopKProcessor
from utils.metrics.draft_trace import DraftTrace, DraftTracer, TracedDrafter, holds, rank
from utils.metrics.results import Generation, collect
from utils.repl.runner import Verdict
from utils.screen.debug_rounds import NEAR_MISS, RATIO_LEVELS, UNLIKELY, round_pieces, trace_lines

PROMPT = [5, 6, 7, 8, 5, 6]


def noted(processor: Any, rule: str = "rejection") -> tuple[Any, Any, Generation]:
    """Two tiny models and a run of theirs of which notes were taken."""
    target, drafter = tiny_llama(seed=0), tiny_llama(seed=1)
    decoding = Decoding.of(processor, 24, end_ids=None, seed=3)
    tracer, judge = DraftTracer(accepts_by_ratio=rule == "rejection"), RULES[rule]
    drafts = ModelDrafter(ModelSession(drafter), decoding, target.config.vocab_size, shares_noise=judge.shares_noise)
    steps = speculative_steps(
        PROMPT, TracedDrafter(drafts, tracer), ModelSession(target), decoding, gamma=3, rule=judge
    )
    return target, drafter, collect(steps, tracer=tracer)


@pytest.mark.parametrize("rule", ["rejection", "coupled", "block"])
@pytest.mark.parametrize("processor", [GreedyProcessor(), MultinomialProcessor(2.0)])
def test_notes_say_what_the_models_say_when_they_are_asked_anew(processor: Any, rule: str) -> None:
    target, drafter, run = noted(processor, rule)
    made: list[int] = []
    fallen = 0
    for step, notes in zip(run.steps, run.traces, strict=True):
        assert len(notes) == min(len(step.drafted), step.accepted + 1)
        for place, note in enumerate(notes):
            before = made + list(step.drafted[:place])
            p, q = (next_logits(model, PROMPT, before).double().softmax(-1) for model in (target, drafter))
            assert note.token == step.drafted[place] and note.p == pytest.approx(p[note.token].item(), rel=1e-4)
            assert note.q == pytest.approx(q[note.token].item(), rel=1e-4) and note.target_p == pytest.approx(
                p[note.target_token].item(), rel=1e-4
            )
            assert note.rank == 1 + int((p > p[note.token]).sum()) and note.is_accepted == (place < step.accepted)
            assert (note.acceptance is None) == (rule != "rejection") and note.match_length is None
            fallen += not note.is_accepted
        if notes and not notes[-1].stood:
            assert notes[-1].wanted == step.token
        made += step.tokens
    assert fallen > 3


def test_the_chance_is_that_of_the_laws_that_judge() -> None:
    processor = MultinomialProcessor(2.0)
    target, drafter, run = noted(processor)
    note = run.traces[0][0]
    p, q = (processor(next_logits(model, PROMPT, [])[None])[0, note.token].item() for model in (target, drafter))
    assert note.acceptance == pytest.approx(min(1.0, p / q), rel=1e-4) and note.ratio == pytest.approx(note.p / note.q)
    assert run.steps == noted(processor)[2].steps


def test_taking_notes_changes_no_run() -> None:
    target, drafter, run = noted(MultinomialProcessor(2.0))
    decoding = Decoding.of(MultinomialProcessor(2.0), 24, end_ids=None, seed=3)
    drafts = ModelDrafter(ModelSession(drafter), decoding, target.config.vocab_size)
    plain = collect(speculative_steps(PROMPT, drafts, ModelSession(target), decoding, gamma=3))
    assert plain.steps == run.steps and plain.notes == ()


def test_where_hits_came_from() -> None:
    """Every origin is found again by asking a storage that holds nothing else."""
    target = tiny_llama()
    decoding = Decoding.of(GreedyProcessor(), 60, end_ids=None, seed=3)
    storage = NGramStorage(3, target.config.vocab_size)
    storage.initialize([7, 8, 9, 30, 31, 32])  # an earlier prompt
    tracer = DraftTracer()
    drafts = TracedDrafter(NGramDrafter(storage, decoding.noise, filler_top_k=8), tracer)
    run = collect(speculative_steps(PROMPT, drafts, ModelSession(target), decoding, gamma=3), tracer=tracer)
    prompt, earlier = (NGramStorage(3, target.config.vocab_size) for _ in range(2))
    prompt.initialize(PROMPT)
    earlier.initialize([7, 8, 9, 30, 31, 32])
    seen, made = set(), list(PROMPT)
    for step, notes in zip(run.steps, run.traces, strict=True):
        for place, note in enumerate(notes):
            assert note.match_length in (1, 2) and note.q is None and note.acceptance is None
            gram = [*made, *step.drafted[:place]][-note.match_length :] + [note.token]
            assert (note.origin == "the prompt") == prompt.has_gram(gram)
            assert note.origin != "an earlier prompt" or earlier.has_gram(gram)
            if note.origin == "the answer":
                assert holds(made, gram)
            if note.origin == "the target's runners-up":
                places = [
                    index for index in range(len(PROMPT), len(made)) if made[index - note.match_length : index] == gram[:-1]
                ]
                best = [next_logits(target, made[:index], []).topk(8).indices.tolist() for index in places]
                assert any(note.token in tokens for tokens in best) and not holds(made, gram)
            seen.add(note.origin)
        made += step.tokens
    assert {"the prompt", "the answer", "the target's runners-up"} <= seen


def test_an_earlier_prompt_and_the_seed_are_named() -> None:
    target = tiny_llama()
    decoding = Decoding.of(GreedyProcessor(), 12, end_ids=None, seed=3)
    earlier, tracer = NGramStorage(2, target.config.vocab_size), DraftTracer()
    earlier.initialize([PROMPT[-1], 55])
    drafts = TracedDrafter(NGramDrafter(earlier, decoding.noise, filler_top_k=1, stop_if_unknown=False), tracer)
    run = collect(
        speculative_steps([9, PROMPT[-1]], drafts, ModelSession(target), decoding, gamma=2), tracer=tracer
    )
    assert run.traces[0][0].origin == "an earlier prompt" and run.traces[0][0].token == 55
    assert any(note.origin == "the seed" and note.match_length == 0 for notes in run.traces for note in notes)


def test_ranks_count_equals_by_id() -> None:
    row = torch.tensor([1.0, 3.0, 3.0, 2.0])
    assert [rank(row, token) for token in range(4)] == [4, 1, 2, 3]


def note(p: float, q: float | None, rank: int = 2, wanted: int = 9) -> DraftTrace:
    return DraftTrace(5, p, rank, q, None, wanted, 0.6)


def test_shapes_tell_the_ratio_without_colour() -> None:
    notes = [note(p, 0.5, wanted=5) for p in (0.6, 0.3, 0.1)] + [note(0.01, 0.5)]
    pieces = round_pieces(Step((5, 5, 5, 5, 6), 3, 9), None, notes)
    assert [text for text, _ in pieces] == ["+5●", "+5◕", "+5◑", "-5○", "-6", "=9"]
    assert [colour for _, colour in pieces[:4]] == [level[3] for level in RATIO_LEVELS]
    assert [text[-1] for text, _ in round_pieces(Step((5, 5, 5, 5), 3, 9), None, notes, ascii_only=True)[:4]] == list(
        "@o:."
    )


def test_a_draft_that_fell_is_explained() -> None:
    (line,) = trace_lines([note(0.2, 0.5)], None)
    assert "9 (p 0.6)" in line and line.endswith(f"choice 2, p 0.2, q 0.5, p/q 0.4: {NEAR_MISS}")
    assert trace_lines([note(0.001, None, rank=40)], None)[0].endswith(f"choice 40, p 0.001: {UNLIKELY}")
    assert trace_lines([note(0.2, 0.5, wanted=5)], None) == []


def test_full_debug_in_a_session(view: Screen) -> None:
    session = open_session(view)
    for line in ("/length 20", "/debug full", "one two one two"):
        assert session.handle(line) is Verdict.DONE
    shown = view.take()[0]
    assert all(part in shown for part in ("● p/q", "the draft is choice ", "hits: ", "the prompt ("))
    session.handle("/debug on")
    session.handle("one two one two")
    assert "the draft is choice " not in view.take()[0] and session.settings.debug == "on"
    session.handle("/debug")
    assert session.settings.debug == "off" and session.handle("/debug loud") is Verdict.FAILED


def test_no_piece_is_broken_on_a_narrow_terminal() -> None:
    view = screen(width=40, colour=True)
    drafted = tuple(range(1000, 1012))
    view.renderer.round(1, Step(drafted, 12, 2000), None)
    lines = [
        line.replace("\x1b[32m", "").replace("\x1b[34m", "").replace("\x1b[0m", "")
        for line in view.take()[0].splitlines()
    ]
    assert len(lines) == 3 and all(len(line) <= 40 for line in lines)
    assert " ".join(lines).split() == ["1", *(f"+{token}" for token in drafted), "*2000"]


@pytest.mark.parametrize("verify", ["rejection", "coupled"])
@pytest.mark.parametrize(
    ("kind", "word"),
    [("t5", "loaded"), ("t5", "suffix"), ("t5", "ngram"), ("model", "chain"), ("head", "chain"), ("model", "lookup")],
)
def test_notes_on_every_kind_of_drafter_and_target(kind: str, word: str, verify: str) -> None:
    """Nothing is changed by them; every draft that was judged has one; origins are found again in the prompt and the answer."""
    settings = Settings(length=30, processor=TopKProcessor(1.0, 5), verify=verify, gamma=3, seed=1)
    row, tracer = strategy_of(word, pair(kind)), DraftTracer(accepts_by_ratio=verify == "rejection")
    plain = list(row.steps(fresh(kind, settings)))
    run = collect(row.steps(replace(fresh(kind, settings), tracer=tracer)), tracer=tracer)
    assert list(run.steps) == plain and any(run.traces)
    prompt = fresh(kind, settings).prompt
    said = [0] if kind == "t5" else list(prompt)
    for step, notes in zip(run.steps, run.traces, strict=True):
        assert [note.is_accepted for note in notes] == [
            place < step.accepted for place in range(min(len(step.drafted), step.accepted + 1))
        ]
        for place, note in enumerate(notes):
            assert (note.match_length is None) == (note.q is not None)
            gram = [*said, *step.drafted[:place]][-(note.match_length or 0) :] + [note.token]
            if note.match_length:
                where = (
                    "the prompt"
                    if holds(prompt, gram)
                    else "the answer"
                    if holds(said, gram)
                    else "the target's runners-up"
                )
                assert note.origin == where
        said += step.tokens


def test_rows_of_a_draft_hold_no_more_than_themselves() -> None:
    model = tiny_t5()
    drafter = ModelDrafter(
        ModelSession(model), Decoding.of(GreedyProcessor(), 20, end_ids=None, seed=1), model.config.vocab_size
    )
    drafter.begin(PROMPT, [0])
    draft = drafter.propose([0] + [5] * 10, 3)
    assert len(draft.said) == 3 and all(row.untyped_storage().nbytes() == row.nbytes for row in draft.said)
