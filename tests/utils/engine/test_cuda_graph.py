"""Replayed graphs on the CPU, with a graph that repeats recorded operations: logits, rewinds, forks, buffers."""

from random import Random

import pytest
import torch
from decoder_families import FAMILIES, in_turn, tiny_model
from graphs_on_cpu import MODELS, VOCABULARY, attached, equal, ids, replays
from tiny import tiny_head

from sampling.drafters.feature_sessions import HeadDrafter, HeadSession
from sampling.speculative import speculative_steps
from utils.decode.decoding import Decoding
from utils.decode.features import layer_count
from utils.decode.model_session import ModelSession
from utils.engine import graph_cache
from utils.engine.graph_cache import SMALLEST, SPARE_SLOTS, SlotPool
from utils.logits_processor import GreedyProcessor


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name in ("llama", "two kinds of layers", "learned positions") else pytest.mark.full
        )
        for name in MODELS
    ],
)
def test_random_widths_rewinds_and_forks_give_the_plain_logits(name: str) -> None:
    plain, model, random = MODELS[name](), attached(MODELS[name]()), Random(name)
    for _ in range(2):  # the second run replays what the first has recorded, on the buffers that it has left
        sessions = [ModelSession(each) for each in (plain, model)]
        context = ids(random.randint(1, 40), random)
        while len(context) < 80:
            drafts = ids(random.choice([0, 1, 2, 3, 4, 7, 8, 9, 11, 16, 20]), random)
            fed = [*context, *drafts]
            keep = random.randint(1, len(drafts) + 1)
            expected, logits = (session.feed(fed, keep=keep) for session in sessions)
            assert equal(logits, expected), (len(context), len(drafts))
            context = fed[: len(context) + random.randint(0, len(drafts))]
            for session in sessions:
                session.rewind(len(context))
            context += ids(1, random)
            if random.random() < 0.2:
                branch = [*context, *ids(3, random)]
                expected, logits = (session.fork().feed(branch, keep=2) for session in sessions)
                assert equal(logits, expected)


def test_logits_stay_as_they_are_when_the_graph_is_replayed() -> None:
    model, random = attached(MODELS["llama"]()), Random(1)
    cache, outputs = model.forward.new_cache(), []
    with torch.no_grad():
        for width in (20, 2, 2):
            tokens = torch.tensor([ids(width, random)])
            output = model(input_ids=tokens, past_key_values=cache, output_hidden_states=True)
            tensors = (output.logits, *output.hidden_states)
            outputs.append((tensors, [tensor.clone() for tensor in tensors]))
    assert replays(model) == 2 and cache.get_seq_length() == 24
    for tensors, copies in outputs:
        assert all(map(torch.equal, tensors, copies)) and not any(copy.isnan().any() for copy in copies)


@pytest.mark.parametrize("prompt", [14, 80])  # the longer one is read by transformers
@pytest.mark.parametrize("name", ["llama", "two kinds of layers", "learned positions"])
def test_hidden_states_are_those_of_the_plain_model(name: str, prompt: int) -> None:
    plain, model, random = MODELS[name](), attached(MODELS[name]()), Random(2)
    context, features = ids(prompt + 40, random), []
    before_the_norm = layer_count(plain) + 1
    for each in (plain, model):
        session = ModelSession(each, features=(1, *([-1] if prompt == 80 else []), before_the_norm))
        session.feed(context[:prompt], keep=1)
        for more in (1, 5, 14, 16, 36, 37):  # widths 1, 4, 9, 2, 20, which has no graph, and 1
            session.feed(context[: prompt + more], keep=1)
        features.append(session.take_features())
    assert features[1] is not None and features[0].shape == features[1].shape and equal(features[1], features[0])
    assert replays(model)


def test_a_run_moves_to_longer_buffers_and_back_to_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "SMALLEST", 32)
    plain, model, random = MODELS["llama"](), attached(MODELS["llama"]()), Random(3)
    for length in (90, 20):
        context = ids(length, random)
        logits = []
        for each in (plain, model):
            session = ModelSession(each)
            session.feed(context[:7], keep=1)
            rows = [session.feed(context[: end + 1], keep=1) for end in range(7, length)]
            session.rewind(length // 2)
            rows.append(session.feed([*context[: length // 2], 3, 4], keep=2))
            logits.append(torch.cat(rows))
        assert equal(logits[1], logits[0])
    assert max(model.forward.pool._spare) == 128 and len(model.forward.pool._spare[32]) <= 2


def test_batches_leave_the_slot() -> None:
    plain, model, random = MODELS["llama"](), attached(MODELS["llama"]()), Random(4)
    context, results = ids(12, random), []
    for each in (plain, model):
        session = ModelSession(each)
        session.feed(context, keep=1)
        before = replays(model) if each is model else 0
        session.select([0, 0, 0])
        rows = [[*context, token] for token in (5, 6, 7)]
        first = session.feed_rows(rows, keep=1)
        session.select([2, 0, 0])
        second = session.feed_rows([[*rows[row], 9, 8] for row in (2, 0, 0)], keep=2)
        fork = session.fork().feed_rows([[*rows[row], 9, 8, 1] for row in (2, 0, 0)], keep=1)
        results.append(torch.cat([part.flatten() for part in (first, second, fork)]))
    assert equal(results[1][None], results[0][None])
    assert replays(model) == before


def test_a_single_row_that_was_selected_is_not_read_from_the_slot() -> None:
    """The slot still holds the row from which the beams began."""
    plain, model, random = MODELS["llama"](), attached(MODELS["llama"]()), Random(8)
    context, results = ids(12, random), []
    for each in (plain, model):
        session = ModelSession(each)
        session.feed(context, keep=1)
        session.select([0, 0])
        session.feed_rows([[*context, 5], [*context, 6]], keep=1)
        session.select([1])
        results.append(
            torch.cat([session.feed([*context, 6, 7], keep=1), session.feed([*context, 6, 7, 8, 9], keep=2)])
        )
    assert equal(results[1], results[0])


def test_a_run_that_begins_with_a_batch_leaves_no_rows_in_the_slot() -> None:
    plain, model, random = MODELS["llama"](), attached(MODELS["llama"]()), Random(9)
    rows, results = [ids(9, random) for _ in range(3)], []
    for each in (plain, model):
        batch = ModelSession(each).feed_rows(rows, keep=1)
        session = ModelSession(each)
        alone = torch.cat([session.feed(rows[0][:end], keep=1) for end in (6, 7, 9)])
        results.append(torch.cat([batch.flatten(0, 1), alone]))
    assert equal(results[1], results[0])


def test_the_same_run_twice_has_the_same_bits() -> None:
    """The first run records on a new slot; a short prompt must be computed alike in both."""
    model, random = attached(MODELS["llama"]()), Random(5)
    context, runs = ids(12, random), []
    for _ in range(2):
        session = ModelSession(model)
        runs.append(torch.cat([session.feed(context[:end], keep=1) for end in (5, 6, 9, 12)]))
    assert torch.equal(*runs)


def test_positions_beyond_the_context_length_are_not_padded() -> None:
    model, plain, random = attached(MODELS["learned positions"]()), MODELS["learned positions"](), Random(6)
    context, sessions = ids(128, random), []
    for each in (plain, model):
        session = ModelSession(each)
        session.feed(context[:115], keep=1)
        sessions.append(session.feed(context[:127], keep=12))  # would be padded to 132 of 128 positions
    assert equal(sessions[1], sessions[0])
    session = ModelSession(model)
    session.feed(context[:119], keep=1)
    before = replays(model)
    session.feed(context, keep=9)  # up to the last position
    assert replays(model) == before + 1


def test_buffers_are_used_up_to_their_last_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "SMALLEST", 32)
    session, context, slots = ModelSession(attached(MODELS["llama"]())), ids(33, Random(10)), []
    for end in (30, 32, 33):
        session.feed(context[:end], keep=1)
        slots.append(session._cache.slot)
    assert slots[0] is slots[1] and [slot.capacity for slot in slots] == [32, 32, 64]


def test_a_pool_keeps_few_slots_and_returns_to_short_ones() -> None:
    pool = SlotPool(torch.device("cpu"))
    slots = [pool.take(1) for _ in range(SPARE_SLOTS + 1)]
    for slot in slots:
        pool.give(slot)
    assert [pool.take(1) in slots for _ in slots] == [True] * SPARE_SLOTS + [False]
    for factor in (2, 4):
        with pool.lengthened(factor):
            assert pool.take(1).capacity == factor * SMALLEST
    assert [pool.capacity(SMALLEST * part // 4) // SMALLEST for part in (0, 4, 5, 8, 9, 17)] == [1, 1, 2, 2, 4, 8]
    assert pool.take(1).capacity == SMALLEST


def test_a_head_reads_the_hidden_states_of_replays() -> None:
    texts = []
    for replaced in (False, True):
        model = MODELS["llama"]()
        head = tiny_head(model)
        if replaced:
            attached(model)
        decoding = Decoding.of(GreedyProcessor(), 16, end_ids=frozenset(), seed=1)
        session = ModelSession(model, features=head.feature_layers)
        drafter = HeadDrafter(HeadSession(head), decoding, VOCABULARY)
        steps = list(speculative_steps([5, 6, 7, 8], drafter, session, decoding, gamma=3))
        texts.append([(step.drafted, step.accepted, step.token) for step in steps])
    assert texts[0] == texts[1]


def test_prompts_and_unusual_calls_run_eagerly() -> None:
    model, plain = attached(MODELS["llama"]()), MODELS["llama"]()
    tokens = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, plain(tokens).logits)  # positional, and without a cache
        mask = torch.tensor([[0, 1, 1, 1]])
        assert torch.equal(model(tokens, attention_mask=mask).logits, plain(tokens, attention_mask=mask).logits)
        texts = [each.generate(tokens, max_new_tokens=8, do_sample=False) for each in (model, plain)]
    assert torch.equal(*texts)
    assert isinstance(model(input_ids=tokens, return_dict=False), tuple)


@pytest.mark.parametrize("grad", [True, False])
def test_unusual_calls_on_a_filled_cache_run_eagerly(grad: bool) -> None:
    model = attached(MODELS["llama"]())
    with torch.set_grad_enabled(grad):
        cache = model.forward.new_cache()
        model(input_ids=torch.tensor([[3, 4, 5, 6]]), past_key_values=cache)
        before = replays(model)
        options = {} if grad else {"return_dict": False}
        output = model(input_ids=torch.tensor([[7]]), past_key_values=cache, **options)
    assert output[0].requires_grad is grad and isinstance(output, tuple) is not grad
    assert replays(model) == before


@pytest.mark.parametrize("name", in_turn((name,) for name in FAMILIES))
def test_families_of_decoders_give_the_plain_logits(name: str) -> None:
    plain, model, random = tiny_model(name), attached(tiny_model(name)), Random(name)
    context = [random.randrange(160) for _ in range(40)]
    rows = []
    for each in (plain, model):
        session = ModelSession(each)
        logits = [session.feed(context[:20], keep=1)]
        for end in (22, 23, 31):
            logits.append(session.feed([*context[:end], 7, 8], keep=3))
            session.rewind(end)
        rows.append(torch.cat(logits))
    assert equal(rows[1], rows[0]) and replays(model) == 3
