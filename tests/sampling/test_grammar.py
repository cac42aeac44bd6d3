"""A grammar masks every model's logits: texts follow the target's distribution under its masks, whatever drafts.

The masks are computed anew here by an automaton, and every path of a run is enumerated (see exact.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from exact import distance, text_probs
from fakes import TinyPair, table_pair, tiny_pair
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from samplers import SAMPLERS
from tiny import tiny_head
from tiny_jobs import replay_gammas, strategy_of
from tokenizers import Tokenizer, decoders, models
from toys import ToyModel, decoding, opposed, session, toy
from transformers import PreTrainedTokenizerFast

from ngram_assisted import LongestMatch, MatchDrafter, NGramDrafter, NGramStorage
from sampling import RULES, AdaptiveGamma, HeadSession, ModelDrafter, autoregressive_steps, speculative_steps
from sampling.beam_search import BeamWidth, beam_search_steps
from utils.commands.experiments import speed_model
from utils.commands.experiments.speed_model import Prediction
from utils.comparison.arms import LocalArm, ids_of
from utils.comparison.strategies import STRATEGIES, Job
from utils.config.settings import Settings
from utils.config.value_types import ProcessorSpec
from utils.decode.decoding import Decoding
from utils.decode.grammar import Grammar, grammar_of
from utils.decode.steps import Step
from utils.errors import UserError
from utils.logits_processor import GreedyProcessor
from utils.metrics.costs import Costs
from utils.metrics.results import DraftTracer, Stopwatch, TimedDrafter, acceptance_of, collect, tokens_of
from utils.pairs.drafter_kinds import DrafterCaches
from utils.prompts.request_fields import grammar_text, parse_request

A, B, C, D, END, PADDING = range(6)
SIZE, LENGTH, PROMPT = 6, 7, [B, C, A, B]
PATTERN = "(a[bc]ddc?)+"
# The same language: state -> token -> next state. After END everything is allowed.
AUTOMATON = {0: {A: 1}, 1: {B: 2, C: 2}, 2: {D: 3}, 3: {D: 4}, 4: {C: 5, A: 1, END: 6}, 5: {A: 1, END: 6}}
AUTOMATON[6] = dict.fromkeys(range(SIZE), 6)
TARGET = toy(1, SIZE)
ROUNDING = 1e-12


@cache
def grammar() -> Grammar:
    vocabulary = {"a": A, "b": B, "c": C, "d": D, "<end>": END}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    return Grammar(LLMatcher.grammar_from_regex(PATTERN), from_tokenizer(tokenizer), frozenset({END}))


def allowed(text: Iterable[int]) -> set[int]:
    state = 0
    for token in text:
        state = AUTOMATON[state][token]
    return {*AUTOMATON[state]}


def plan_of(processor: Any = SAMPLERS[0], **options: Any) -> Decoding:
    return replace(decoding(LENGTH, processor=processor, ends=[END], **options), grammar=grammar())


def target_session() -> Any:
    found = session(TARGET)
    found.grammar = grammar()
    return found


def masked_probs(processor: Any) -> dict[tuple[int, ...], float]:
    """The exact probability of every text."""
    texts, ended = {(): 1.0}, dict[tuple[int, ...], float]()
    for _ in range(LENGTH):
        longer = {}
        for text, mass in texts.items():
            row = torch.full((SIZE,), -torch.inf)
            ids = sorted(allowed(text))
            row[ids] = TARGET.table[(*PROMPT, *text)[-1], ids]
            for token, weight in enumerate(processor(row[None])[0].tolist()):
                if weight:
                    (ended if token == END else longer)[(*text, token)] = mass * weight
        texts = longer
    return ended | texts


def checked(steps: Iterator[Step]) -> Iterator[Step]:
    """The rounds, up to the first forbidden token: with it, the paths of an enumeration would be too many."""
    text: list[int] = []
    for step in steps:
        for token in step.tokens:
            assert token in allowed(text)
            text.append(token)
        yield step


def run(
    noise: Any = None,
    *,
    kind: str,
    processor: Any = SAMPLERS[0],
    rule: str = "rejection",
    gamma: int = 3,
    seed: int = 0,
    drafter: ToyModel | None = None,
) -> Iterator[Step]:
    plan = plan_of(processor, noise=noise, seed=seed)
    if kind == "target":
        return autoregressive_steps(PROMPT, target_session(), plan)
    chosen = RULES[rule]
    if kind == "ngram":  # after unknown contexts drafts are random, and often forbidden
        made: Any = NGramDrafter(NGramStorage(3, SIZE), plan.noise, stop_if_unknown=False)
    elif kind == "lookup":
        made = MatchDrafter(LongestMatch(1))
    else:
        made = ModelDrafter(session(drafter or opposed(TARGET)), plan, SIZE, shares_noise=chosen.shares_noise)
    return speculative_steps(PROMPT, made, target_session(), plan, gamma=gamma, rule=chosen)


SHORT = ToyModel(toy(3, SIZE).table[:, :D])  # a drafter whose vocabulary ends before d
LACKING = ToyModel(toy(3, SIZE).table.index_fill(1, torch.tensor([C, D]), -torch.inf))  # never drafts c or d


RUNS: list[dict[str, Any]] = [
    {"kind": "target"},
    {"kind": "model"},
    {"kind": "model", "gamma": 2, "rule": "block"},
    {"kind": "model", "gamma": 2, "drafter": LACKING},
    {"kind": "model", "drafter": SHORT},
    {"kind": "ngram"},
    {"kind": "lookup"},
]


@pytest.mark.parametrize(
    ("options", "processor"),
    [
        pytest.param(options, processor, marks=() if options["kind"] == "target" or turn == 0 else pytest.mark.full)
        for index, options in enumerate(RUNS)
        for turn, processor in enumerate(SAMPLERS[place % 3] for place in range(index, index + 3))
    ],
    ids=str,
)
def test_texts_follow_the_targets_distribution_under_the_masks(options: Any, processor: Any) -> None:
    expected = masked_probs(processor)
    assert len(expected) > 4
    found = text_probs(lambda noise: checked(run(noise, processor=processor, **options)))
    assert distance(found, expected) < ROUNDING


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["model", "ngram", "lookup"])
def test_greedy_and_coupled_texts_are_the_targets(kind: str, rule: str) -> None:
    same_noise = rule == "coupled" or kind != "model"
    for processor in (GreedyProcessor(), *(SAMPLERS[1:3] if same_noise else ())):
        for seed in range(4):
            expected = tokens_of(run(kind="target", processor=processor, seed=seed))
            for gamma in (1, 2, 5):
                made = run(kind=kind, processor=processor, rule=rule, gamma=gamma, seed=seed)
                assert tokens_of(made) == expected


@pytest.mark.parametrize("kind", ["model", "ngram", "lookup"])
def test_forced_tokens_are_accepted_and_counted_apart(kind: str) -> None:
    forced = 0
    for seed in range(20):
        text: list[int] = []
        steps = list(run(kind=kind, seed=seed, gamma=4))
        for step in steps:
            assert step.forced == tuple(
                place for place in range(len(step.drafted)) if len(allowed([*text, *step.drafted[:place]])) == 1
            )
            # A round begins with what is forced, and only a draft before a forced token can reject it.
            run_of: list[int] = []
            while len(run_of) < min(4, LENGTH - len(text) - 1) and len(allowed([*text, *run_of])) == 1:
                run_of.extend(allowed([*text, *run_of]))
            assert list(step.drafted[: len(run_of)]) == run_of
            assert step.accepted not in step.forced
            text.extend(step.tokens)
        own = [
            (place < step.accepted, place)
            for step in steps
            for place in range(len(step.drafted))
            if place not in step.forced
        ]
        result = collect(iter(steps))
        assert (result.drafted, result.accepted) == (len(own), sum(good for good, _ in own))
        assert acceptance_of(steps) == (sum(good for good, _ in own) / len(own) if own else None)
        assert result.forced + result.accepted == sum(step.accepted for step in steps)
        assert sum(tried for _, tried in result.accepted_by_position) <= len(own)
        forced += result.forced
    assert forced > 20


def test_an_id_that_is_left_over_can_be_drawn() -> None:
    """A drafter may lack it."""
    logits = grammar().masked(torch.full((1, SIZE), -torch.inf), [])
    assert logits[0].isfinite().nonzero().tolist() == [[A]]


def test_beams_are_the_best_texts_that_the_grammar_allows() -> None:
    """With a beam for every text and scores without a penalty, the likeliest one of all; with few beams, an allowed
    one.
    """
    texts = masked_probs(SAMPLERS[0])
    assert len(texts) == len({*texts}) < 64
    for width in (BeamWidth(1, 1), BeamWidth(2, 3), BeamWidth(64, SIZE, alpha=0.0)):
        found = tuple(tokens_of(beam_search_steps(PROMPT, target_session(), plan_of(), width)))
        assert found in texts
    assert found == max(texts, key=texts.__getitem__)


def test_drafts_end_before_the_first_forbidden_token() -> None:
    for seed in range(20):
        text: list[int] = []
        for step in run(kind="ngram", seed=seed):
            for place, token in enumerate(step.drafted):
                assert token in allowed([*text, *step.drafted[:place]])
            text.extend(step.tokens)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "size": {"enum": ["large", "larger", "small"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
REQUEST = json.dumps({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}})


def test_masks_depend_on_the_text_alone() -> None:
    """Whatever was asked before: the matcher is moved forwards and backwards."""
    pair = table_pair()
    one, random = grammar_of(grammar_text(REQUEST), pair.tokenizer, pair.end_ids), Random(0)
    text: list[int] = []
    for _ in range(60):
        del text[random.randint(0, len(text)) :]
        for _ in range(random.randint(0, 30)):
            ids = (~one.forbidden(text, 1, 300)[0]).nonzero().flatten().tolist()
            text.append(random.choice(ids))
            if text[-1] in pair.end_ids:
                break
        other = Grammar(grammar_text(REQUEST), from_tokenizer(pair.tokenizer), pair.end_ids)
        assert torch.equal(one.forbidden(text, 5, 310), other.forbidden(text, 5, 310))


def pair_of(kind: str, word: str = "loaded") -> TinyPair:
    """A head reads hidden states, and layers are cut off; any other drafter may be of tables."""
    if kind == "head":
        pair = tiny_pair()
        pair.drafter, pair.drafter_kind = tiny_head(pair.target), "head"
        return pair
    return tiny_pair(num_hidden_layers=2) if word == "layers:1" else table_pair()


@pytest.mark.parametrize(
    ("kind", "word", "verify", "gamma"),
    [
        ("model", "loaded", "rejection", 5),
        ("model", "chain", "coupled", None),
        ("model", "layers:1", "coupled", 3),
        ("head", "loaded", "coupled", 6),
        ("head", "chain", "rejection", 4),
        ("model", "suffix", "block", 4),
        ("model", "lookup", "rejection", 9),
    ],
)
def test_texts_of_all_strategies_are_the_targets_and_follow_the_schema(
    kind: str, word: str, verify: str, gamma: int | None
) -> None:
    pair = pair_of(kind, word)
    processor = ProcessorSpec(1.5) if verify == "coupled" else ProcessorSpec(is_greedy=True)
    settings = Settings(
        request=REQUEST, drafter_kind=(word,), verify=verify, gamma=gamma, length=120, processor=processor, beams=2
    )
    rows = [variant for row in STRATEGIES for variant in row.variants((word,), pair)]
    for seed in range(2 if verify == "coupled" else 1):  # greedy texts have no other noise than drafts of n-grams
        runs = {row.name: LocalArm(row, pair).run("Hi", replace(settings, seed=seed)) for row in rows}
        for run in runs.values():
            value = json.loads(run.text.removesuffix("<|im_end|>"))
            assert [*value] == ["name", "size", "tags"] and value["size"] in SCHEMA["properties"]["size"]["enum"]
            assert len(value["name"]) <= 3 and len(value["tags"]) <= 2
        assert runs["speculative"].text == runs["ngram"].text == runs["target"].text
        assert runs["target"].forced is None and runs["speculative"].forced and runs["ngram"].forced


def test_without_a_chat_template_texts_are_free() -> None:
    pair = table_pair()
    job = Job([1], pair, Settings(request=REQUEST), NGramStorage(3, 300))
    assert job.session("target").grammar is job.decoding.grammar is job.grammar() is not None
    assert replace(job, settings=Settings(request=REQUEST, chat=False)).grammar() is None
    assert replace(job, settings=Settings(request=REQUEST.replace("json_schema", "text", 1))).grammar() is None


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "json_schema"}, "needs a schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}, "nope"),
        ({"type": "json_schema", "json_schema": {"schema": {"not": {}}}}, "not supported"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_where_it_is_typed(form: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_request(json.dumps({"response_format": form}))


def test_other_types_go_to_servers_only() -> None:
    request = parse_request('{"response_format": {"type": "grammar"}}')
    with pytest.raises(UserError, match="json_object"):
        grammar_text(request)


def test_a_target_without_an_end_token_is_refused() -> None:
    with pytest.raises(UserError, match="end token"):
        grammar_of(grammar_text(REQUEST), table_pair().tokenizer, frozenset())


class Watched(AdaptiveGamma):
    """Notes how many drafts of each round it learns as accepted."""

    def learn(self, buckets: Any, accepted: int, computed: int = 0) -> None:
        self.noted = [*getattr(self, "noted", ()), accepted]
        super().learn(buckets, accepted, computed)


@pytest.mark.parametrize("kind", ["model", "lookup"])
def test_adaptive_gamma_learns_from_the_drafters_own_drafts_only(kind: str) -> None:
    noted = 0
    for seed in range(20):
        plan = replace(plan_of(seed=seed), max_new=30)
        adaptive = Watched(Costs.of([0.01] * 6, {"toy": 0.01}), kind="toy")
        drafter: Any = MatchDrafter(LongestMatch(1), adaptive=adaptive)
        if kind == "model":
            drafter = ModelDrafter(session(TARGET), plan, SIZE, adaptive=adaptive)
        steps = list(speculative_steps(PROMPT, drafter, target_session(), plan, gamma=4))
        for step, accepted in zip(steps, adaptive.noted, strict=True):
            leading = next((index for index in range(9) if index not in step.forced), 9)
            assert accepted == max(0, step.accepted - leading)
            noted += accepted
    assert noted > 3


def test_matches_continue_after_forced_tokens() -> None:
    drafter, text = MatchDrafter(LongestMatch(1)), [1, 2, 3, 4, 5, 1, 2]
    drafter.begin(text, text)
    assert drafter.propose([*text, 3], 2).tokens == [4, 5]


def test_matches_are_found_after_forced_tokens_that_did_not_follow_before() -> None:
    drafter, text = MatchDrafter(LongestMatch(1)), [1, 2, 3, 4, 5, 1, 2]
    drafter.begin(text, text)
    assert drafter.propose([*text, 5], 2).tokens == [1, 2]


def test_a_head_reads_forced_tokens_like_drafts() -> None:
    target = tiny_pair().target
    model, prompt, features = tiny_head(target), [3, 1, 4, 1, 5], torch.randn(4, 64)
    rows = []
    for contexts in ([[*prompt, 9, 2]], [prompt, [*prompt, 9], [*prompt, 9, 2]]):
        head = HeadSession(model)
        head.begin(prompt)
        head.add_features(features, 0, 4)
        rows.append([head.feed(context, keep=1) for context in contexts][-1])
    assert torch.equal(*rows)


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_traces_are_those_of_the_drafts_that_they_belong_to(kind: str) -> None:
    seen = 0
    for seed in range(10):
        plan, tracer = plan_of(seed=seed), DraftTracer()
        drafter: Any = NGramDrafter(NGramStorage(3, SIZE), plan.noise, stop_if_unknown=False, observed=True)
        if kind == "model":
            drafter = ModelDrafter(session(opposed(TARGET)), plan, SIZE, observed=True)
        traced = TimedDrafter(drafter, Stopwatch(), tracer)
        steps = speculative_steps(PROMPT, traced, target_session(), plan, gamma=4)
        text: list[int] = []
        for step in steps:
            traces = tracer.read(step)
            for place, trace in enumerate(traces):
                before = [*text, *step.drafted[:place]]
                assert trace.token == step.drafted[place] and trace.is_accepted == (place < step.accepted)
                if len(allowed(before)) == 1:
                    assert trace.p == 1
                if kind == "model" and trace.q is not None:
                    row = torch.full((SIZE,), -torch.inf, dtype=torch.float64)
                    ids = sorted(allowed(before))
                    row[ids] = -TARGET.table[(*PROMPT, *before)[-1], ids].double()
                    assert trace.q == pytest.approx(float(row.softmax(-1)[trace.token]))
                    seen += place > 0
                seen += trace.match_length is not None
            text.extend(step.tokens)
    assert seen > 5


ANY_OBJECT = json.dumps({"response_format": {"type": "json_object"}})


@pytest.mark.parametrize("word", ["loaded", "suffix", "ngram"])
@pytest.mark.parametrize("request_fields", [REQUEST, ANY_OBJECT])
def test_replayed_rounds_are_those_of_real_runs(request_fields: str, word: str) -> None:
    pair = pair_of("model")
    strategy, forced = strategy_of(word, pair), 0
    settings = Settings(request=request_fields, gamma=4, length=60, verify="coupled", processor=ProcessorSpec(1.0))
    for seed in range(1, 5):
        job = Job(ids_of(pair, f"Hi {seed}", settings), pair, replace(settings, seed=seed), NGramStorage(3, 300))
        again = replace(job, storage=NGramStorage(3, 300), caches=DrafterCaches())
        steps = list(strategy.steps(job))
        rounds = next(one.steps for one in replay_gammas(again, [strategy], tokens_of(steps)) if one.gamma == 4)
        assert [kept(one) for one in rounds] == [kept(one) for one in steps]
        forced += sum(one.accepted_forced for one in steps)
    assert forced > 3


def test_predicted_times_include_the_masks_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, settings = pair_of("model"), Settings(request=ANY_OBJECT, length=30)
    job = Job(ids_of(pair, "Hi", settings), pair, settings, NGramStorage(3, 300))
    run, found = collect(next(row for row in STRATEGIES if row.is_baseline).steps(job)), list[list[Prediction]]()
    assert 0 < speed_model.mask_seconds(job.grammar(), run.tokens, pair.target) < 1  # type: ignore[arg-type]
    for seconds in (0.0, 1.0):
        monkeypatch.setattr(speed_model, "mask_seconds", lambda *_: seconds)  # noqa: B023
        found.append(list(speed_model.predictions(job, [strategy_of("loaded", pair)], run, lambda text: None)))
    drafted = [sum(len(step.drafted) for step in one.steps) for one in found[0]]
    assert [two.seconds - one.seconds for one, two in zip(*found, strict=True)] == pytest.approx(drafted)
    assert max(drafted) > 9 and found[1][1].speedup < found[0][1].speedup


def kept(step: Step) -> tuple[Any, ...]:
    return step.tokens, step.accepted, step.accepted_forced, step.draft_counts
