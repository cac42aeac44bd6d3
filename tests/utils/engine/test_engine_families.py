"""Every engine on every family of decoders: the logits of transformers' forward, and the bits of single steps.

`make test` runs four families.
"""

from functools import cache
from itertools import product
from random import Random

import pytest
import torch
from decoder_families import FAMILIES, in_turn, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from utils.decode.engine_forward import engine_forward
from utils.decode.layer_cut import first_layers
from utils.decode.model_session import ModelSession
from utils.decode.sliding_window import keeps_all
from utils.engine.engine import AS_LOADED, LAYER_ENGINES
from utils.engine.layer_engine import unreported

PREFILL, LENGTH, VOCABULARY = 70, 84, 160  # a prefill of more tokens than any verify pass has
# Eager attention, which models with capped scores have, may be computed in no other way than by transformers.
UNSUPPORTED = {("invariant", "gemma2"): "eager"}
ENGINES = [name for name, row in LAYER_ENGINES.items() if row.promise]
SUPPORTED = [(engine, name) for engine in ENGINES for name in FAMILIES if (engine, name) not in UNSUPPORTED]


def tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(count)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The number for which the engines are installed."""
    torch.set_num_threads(1)


@cache
def computed_by(engine: str, name: str, threads: int = 1, **overrides: int) -> PreTrainedModel:
    """A model of which the engine computes the forward pass itself."""
    model = tiny_model(name, **overrides)
    row = LAYER_ENGINES[engine]([model], (), AS_LOADED)
    assert row.unsupported() == ""
    torch.set_num_threads(threads)
    assert row.install(unreported) == ""
    assert (engine_forward(model) is not None) == (engine != "plain")
    return model


@torch.no_grad()
def exact_logits(name: str, context: list[int], **overrides: int) -> Tensor:
    """Logits (T, V) in float64 by transformers' forward without a cache."""
    return tiny_model(name, **overrides).double()(torch.tensor([context])).logits[0]


def next_logits(session: ModelSession, context: list[int], start: int) -> Tensor:
    """Logits (T - start, V) after the tokens from `start` on, one decode step each."""
    return torch.cat([session.feed(context[: end + 1], keep=1) for end in range(start, len(context))])


@pytest.mark.parametrize(("engine", "name"), in_turn([("plain", name) for name in FAMILIES] + SUPPORTED))
def test_the_logits_are_those_of_transformers(engine: str, name: str) -> None:
    context = tokens(Random(name), LENGTH)
    exact = exact_logits(name, context)
    session = ModelSession(computed_by(engine, name))
    prefill = session.feed(context[:PREFILL], keep=2)
    steps = next_logits(session, context[: LENGTH - 9], PREFILL)
    session.rewind(LENGTH - 12)
    verify_pass = session.feed(context, keep=12)
    assert not keeps_all(session.model)
    computed = torch.cat([prefill, steps[:-3], verify_pass])
    assert float((computed - exact[PREFILL - 2 :]).abs().max() / exact.std()) < 1e-4


@pytest.mark.parametrize(("engine", "name"), in_turn(product(ENGINES, ["gemma3_text", "mistral"])))
def test_prompts_much_longer_than_the_sliding_window(engine: str, name: str) -> None:
    """Prefills in several parts, whose last tokens see the first ones of their part."""
    context, fields = tokens(Random(name), 588), {"max_position_embeddings": 1024, "sliding_window": 40}
    exact = exact_logits(name, context, **fields)
    session = ModelSession(computed_by(engine, name, **fields))
    logits = torch.cat([session.feed(context[:516], keep=2), session.feed(context, keep=4)])
    assert float((logits - exact[[514, 515, 584, 585, 586, 587]]).abs().max() / exact.std()) < 1e-4


TWO_THREADS = [("2", "invariant", "llama of odd sizes"), ("2", "invariant", "olmo2")]


@pytest.mark.parametrize(("threads", "engine", "name"), in_turn(TWO_THREADS + [("1", *pair) for pair in SUPPORTED]))
def test_bits_after_a_prefill_depend_neither_on_widths_nor_on_forks(threads: str, engine: str, name: str) -> None:
    torch.set_num_threads(int(threads))
    random = Random(name)
    context = tokens(random, LENGTH)
    session = ModelSession(computed_by(engine, name, int(threads)))
    session.feed(context[:PREFILL], keep=1)
    alone = next_logits(session.fork(), context, PREFILL)
    known = PREFILL
    while known < LENGTH:
        width, wrong = random.randint(1, min(9, LENGTH - known)), random.randint(0, 4)
        other = session.fork() if random.random() < 0.5 else session  # the session itself is fed something else below
        logits = other.feed([*context[: known + width], *tokens(random, wrong)], keep=width + wrong)
        assert torch.equal(logits[:width], alone[known - PREFILL : known - PREFILL + width])
        if other is not session:
            session.feed([*context[:known], *tokens(random, 3)], keep=3)
            session.rewind(known)
            session = other
        known += width
        session.rewind(known)


@pytest.mark.parametrize(("engine", "name"), in_turn(SUPPORTED))
def test_bits_of_a_batch_are_those_of_its_texts(engine: str, name: str) -> None:
    random = Random(name)
    contexts = [tokens(random, 16) for _ in range(random.randint(2, 3))]
    model = computed_by(engine, name)
    alone = torch.stack([next_logits(ModelSession(model), context, 0) for context in contexts])
    session, known = ModelSession(model), 0
    while known < 16:
        width, wrong = random.randint(1, min(9, 16 - known)), random.randint(0, 3)
        fed = [[*context[: known + width], *tokens(random, wrong)] for context in contexts]
        logits = session.feed_rows(fed, keep=width + wrong)
        assert torch.equal(logits[:, :width], alone[:, known : known + width])
        known += width
        session.rewind(known)


@pytest.mark.parametrize(("engine", "name"), UNSUPPORTED)
def test_families_that_an_engine_does_not_support_are_refused(engine: str, name: str) -> None:
    assert UNSUPPORTED[engine, name] in LAYER_ENGINES[engine]([tiny_model(name)], (), AS_LOADED).unsupported()


@pytest.mark.parametrize("name", ["gemma3_text", "llama", "phi3"])
@torch.no_grad()
def test_what_the_forward_pass_does_not_compute_is_left_to_transformers(name: str) -> None:
    """Padded batches, and caches that transformers' generate makes."""
    random = Random(name)
    model, plain = computed_by("invariant", name), tiny_model(name)
    ids = torch.tensor([tokens(random, 20), [0] * 7 + tokens(random, 13)])
    mask = torch.cat([torch.ones(1, 20), (torch.arange(20) >= 7)[None]]).long()
    for ours, theirs in ((model, plain), (first_layers(model, 1), first_layers(plain, 1))):
        logits, exact = (either(ids, attention_mask=mask).logits for either in (ours, theirs))
        assert float((logits[mask > 0] - exact[mask > 0]).abs().max() / exact.std()) < 1e-4
        texts = [
            either.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False) for either in (ours, theirs)
        ]
        assert torch.equal(*texts)
