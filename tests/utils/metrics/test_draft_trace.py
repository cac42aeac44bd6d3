"""Traces of drafts against the models' own outputs, the lengths of matches, and how traces are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import Screen, open_session, screen
from tiny import next_logits, tiny_llama, tiny_t5
from tiny_jobs import fresh, pair, strategy_of

from ngram_assisted import NGramDrafter, NGramStorage
from sampling import speculative_steps
from sampling.drafters.model import ModelDrafter
from sampling.verification import RULES
from utils.config.settings import Settings
from utils.config.value_types import ProcessorSpec
from utils.decode.decoding import Decoding
from utils.decode.model_session import ModelSession
from utils.decode.steps import Step
from utils.logits_processor import GreedyProcessor, MultinomialProcessor
from utils.metrics.results import DraftTrace, DraftTracer, RoundTiming, Stopwatch, TimedDrafter, collect, rank
from utils.repl.repl_session import Verdict
from utils.screen.run_view import LEGEND, RATIO_LEVELS, round_pieces, show_round, trace_lines

PROMPT = [5, 6, 7, 8, 5, 6]


def traced(steps: Iterator[Step], tracer: DraftTracer) -> list[tuple[Step, Sequence[DraftTrace]]]:
    """The steps of a run with their traces."""
    return [(step, tracer.read(step)) for step in steps]


def traced_run(processor: Any, rule: str = "rejection") -> tuple[Any, Any, list[tuple[Step, Sequence[DraftTrace]]]]:
    """Two tiny models and a traced run."""
    target, drafter = tiny_llama(seed=0), tiny_llama(seed=1)
    decoding = Decoding.of(processor, 16, end_ids=None, seed=3)
    tracer, verification = DraftTracer(accepts_by_ratio=rule == "rejection"), RULES[rule]
    size, shares_noise = target.config.vocab_size, verification.shares_noise
    drafts = ModelDrafter(ModelSession(drafter), decoding, size, shares_noise=shares_noise, observed=True)
    drafts = TimedDrafter(drafts, Stopwatch(), tracer)
    steps = speculative_steps(PROMPT, drafts, ModelSession(target), decoding, gamma=3, rule=verification)
    return target, drafter, traced(steps, tracer)


SAMPLED = MultinomialProcessor(2.0)


@pytest.mark.parametrize(
    ("processor", "rule"),
    [
        *((SAMPLED, "rejection"), (GreedyProcessor(), "coupled"), (SAMPLED, "block")),
        *(pytest.param(GreedyProcessor(), rule, marks=pytest.mark.full) for rule in ("rejection", "block")),
        pytest.param(SAMPLED, "coupled", marks=pytest.mark.full),
    ],
)
def test_traces_have_the_figures_of_separate_forward_passes(processor: Any, rule: str) -> None:
    target, drafter, run = traced_run(processor, rule)
    made: list[int] = []
    rejected = 0
    for step, traces in run:
        assert len(traces) == min(len(step.drafted), step.accepted + 1)
        for position, trace in enumerate(traces):
            before = made + list(step.drafted[:position])
            p, q = (next_logits(model, PROMPT, before).double().softmax(-1) for model in (target, drafter))
            assert trace.token == step.drafted[position] and trace.p == pytest.approx(p[trace.token].item(), rel=1e-4)
            assert trace.q == pytest.approx(q[trace.token].item(), rel=1e-4) and trace.target_p == pytest.approx(
                p[trace.target_token].item(), rel=1e-4
            )
            assert trace.rank == 1 + int((p > p[trace.token]).sum()) and trace.is_accepted == (position < step.accepted)
            assert (trace.acceptance is None) == (rule != "rejection") and trace.match_length is None
            rejected += not trace.is_accepted
        if traces and not traces[-1].is_accepted:
            assert traces[-1].target_token == step.token
        made += step.tokens
    assert rejected > 3


def test_the_acceptance_probability_is_that_of_the_processed_distributions() -> None:
    processor = MultinomialProcessor(2.0)
    target, drafter, run = traced_run(processor)
    trace = run[0][1][0]
    p, q = (processor(next_logits(model, PROMPT, [])[None])[0, trace.token].item() for model in (target, drafter))
    assert trace.acceptance == pytest.approx(min(1.0, p / q), rel=1e-4)
    assert trace.q and trace.ratio == pytest.approx(trace.p / trace.q)
    assert run == traced_run(processor)[2]


def test_tracing_does_not_change_a_run() -> None:
    target, drafter, run = traced_run(MultinomialProcessor(2.0))
    decoding = Decoding.of(MultinomialProcessor(2.0), 16, end_ids=None, seed=3)
    drafts = ModelDrafter(ModelSession(drafter), decoding, target.config.vocab_size)
    untraced = collect(speculative_steps(PROMPT, drafts, ModelSession(target), decoding, gamma=3))
    assert list(untraced.steps) == [step for step, _ in run]


def test_matches_have_the_length_by_which_their_storage_found_them() -> None:
    target = tiny_llama()
    decoding = Decoding.of(GreedyProcessor(), 12, end_ids=None, seed=3)
    earlier, tracer = NGramStorage(2, target.config.vocab_size), DraftTracer()
    earlier.initialize([PROMPT[-1], 55])
    ngrams = NGramDrafter(earlier, decoding.noise, filler_top_k=1, stop_if_unknown=False, observed=True)
    drafts = TimedDrafter(ngrams, Stopwatch(), tracer)
    steps = speculative_steps([9, PROMPT[-1]], drafts, ModelSession(target), decoding, gamma=2)
    run = [traces for _, traces in traced(steps, tracer)]
    assert run[0][0].token == 55 and run[0][0].match_length == 1
    assert {trace.match_length for traces in run for trace in traces} == {0, 1}


def test_equal_logits_are_ranked_by_id() -> None:
    row = torch.tensor([1.0, 3.0, 3.0, 2.0])
    assert [rank(row, token) for token in range(4)] == [4, 1, 2, 3]


def trace(p: float, q: float | None, rank: int = 2, target_token: int = 9) -> DraftTrace:
    return DraftTrace(5, p, rank, q, None, target_token, 0.6)


def test_shapes_show_the_ratio_without_colour() -> None:
    traces = [trace(p, 0.5, target_token=5) for p in (0.6, 0.3, 0.1)] + [trace(0.01, 0.5)]
    pieces = round_pieces(Step((5, 5, 5, 5, 6), 3, 9), None, traces)
    assert [text for text, _ in pieces] == ["+5●", "+5◕", "+5◑", "-5○", "-6", "=9"]
    assert [colour for _, colour in pieces[:4]] == [level[2] for level in RATIO_LEVELS]


def test_a_rejected_draft_is_explained() -> None:
    (line,) = trace_lines([trace(0.2, 0.5)], None)
    assert all(figure in line for figure in ("preferred 9 (p 0.6)", "rank 2 ", "p 0.2, ", "q 0.5, ", "p/q 0.4"))
    (line,) = trace_lines([trace(0.001, None, rank=40)], None)
    assert all(figure in line for figure in ("rank 40 ", "p 0.001")) and "q" not in line.split()
    (line,) = trace_lines([trace(0.7, 0.9, rank=1)], None)
    assert "preferred" not in line, "a sampled token was less likely than the draft"
    assert trace_lines([trace(0.2, 0.5, target_token=5)], None) == []


def test_full_debug_in_a_session(view: Screen) -> None:
    session = open_session(view)
    for line in ("/length 20", "/debug full", "one two one two"):
        assert session.handle(line) is Verdict.DONE
    shown = view.take()[0]
    assert LEGEND in shown and "p/q" in shown.replace(LEGEND, "") and "hits: " in shown
    session.handle("/debug on")
    session.handle("one two one two")
    assert "p/q" not in view.take()[0] and session.settings.debug == "on"
    session.handle("/debug")
    assert session.settings.debug == "off" and session.handle("/debug loud") is Verdict.FAILED


def test_no_token_is_broken_on_a_narrow_terminal() -> None:
    view = screen(width=40, colour=True)
    drafted = tuple(range(1000, 1012))
    show_round(view.renderer, 1, Step(drafted, 12, 2000), None, timing=RoundTiming(0, 0, 0))
    lines = [
        line.replace("\x1b[32m", "").replace("\x1b[34m", "").replace("\x1b[0m", "")
        for line in view.take()[0].splitlines()
    ]
    assert len(lines) >= 3 and all(len(line) <= 40 for line in lines[:3])
    assert " ".join(lines).split()[:14] == ["1", *(f"+{token}" for token in drafted), "*2000"]


DRAFTERS = [("t5", "loaded"), ("t5", "suffix"), ("t5", "ngram"), ("model", "chain"), ("head", "chain")]
DRAFTERS += [("model", "lookup")]


@pytest.mark.parametrize(
    ("kind", "word", "verify"),
    [
        pytest.param(*drafter, rule, marks=pytest.mark.full if (row + column) % 2 else ())
        for row, drafter in enumerate(DRAFTERS)
        for column, rule in enumerate(("rejection", "coupled"))
    ],
)
def test_traces_of_every_kind_of_drafter_and_target(kind: str, word: str, verify: str) -> None:
    """They change nothing, and every verified draft has one."""
    settings = Settings(length=12, processor=ProcessorSpec(1.0, top_k=5), verify=verify, gamma=3, seed=1)
    row, tracer = strategy_of(word, pair(kind)), DraftTracer(accepts_by_ratio=verify == "rejection")
    untraced = list(row.steps(fresh(kind, settings)))
    run = traced(row.steps(replace(fresh(kind, settings), stopwatch=Stopwatch(), tracer=tracer)), tracer)
    assert [step for step, _ in run] == untraced and any(traces for _, traces in run)
    for step, traces in run:
        assert [trace.is_accepted for trace in traces] == [
            position < step.accepted for position in range(min(len(step.drafted), step.accepted + 1))
        ]
        assert all((trace.match_length is None) == (trace.q is not None) for trace in traces)


def test_the_logits_of_a_trace_own_their_memory() -> None:
    """Views would keep the logits of everything that was fed."""
    model = tiny_t5()
    drafter = ModelDrafter(
        ModelSession(model),
        Decoding.of(GreedyProcessor(), 20, end_ids=None, seed=1),
        model.config.vocab_size,
        observed=True,
    )
    drafter.begin(PROMPT, [0])
    evidence = drafter.propose([0] + [5] * 10, 3).evidence
    assert evidence is not None and len(evidence.logits) == 3
    assert all(row.untyped_storage().nbytes() == row.nbytes for row in evidence.logits)
