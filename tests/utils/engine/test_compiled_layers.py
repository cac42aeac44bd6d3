"""What layers compute besides products, in machine code: PyTorch's results in float64, each row by itself."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from decoder_families import ACTIVATIONS, tiny_model
from torch import Tensor

from utils.decode.model_session import ModelSession
from utils.engine import compiled_layers as layers
from utils.engine.compiled_layers import GATES, attention_function, row_function
from utils.engine.decoder_spec import ACTIVATIONS as KNOWN_ACTIVATIONS
from utils.engine.engine import AS_LOADED
from utils.engine.invariant import InvariantEngine
from utils.engine.machine_code import WORKERS, job_list, words

ROWS = 9
CLOSE: dict[str, Any] = {"rtol": 2e-6, "atol": 2e-6}


def run(name: str, kinds: Any, items: int, **values: Any) -> None:
    function = attention_function(values.pop("head")) if name == "attention" else row_function(name)
    arguments = words(kinds, **values)
    WORKERS.run(*job_list([(function, arguments, items)]))


def assert_rows(compute: Callable[[int, int], Tensor], expected: Tensor) -> None:
    """compute: the rows first..last (exclusive). They are the expected ones, with the same bits each alone."""
    torch.set_num_threads(1)
    alone = torch.cat([compute(row, row + 1) for row in range(len(expected))])
    assert torch.allclose(alone.double(), expected, **CLOSE)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for count in range(2, len(expected) + 1):
            assert torch.equal(compute(len(expected) - count, len(expected)), alone[-count:])


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("size", [1, 7, 16, 100, 577])
def test_norms(size: int) -> None:
    torch.manual_seed(size)
    x, weight, eps = torch.randn(ROWS, size + 3) * 10 ** torch.randn(ROWS, 1), torch.randn(size), 1e-3

    def compute(first: int, last: int) -> Tensor:
        own, out = x[first:last], torch.empty(last - first, size + 2)
        others = {"x_stride": size + 3, "out_stride": size + 2, "heads": 1, "eps": eps}
        run("norm", layers.NORM, len(own), x=own, weight=weight, out=out, size=size, **others)
        return out[:, :size]

    assert_rows(compute, normed(x[:, :size], weight, eps))


@pytest.mark.parametrize(("heads", "size"), [(1, 5), (3, 16), (2, 33)])
def test_norms_of_heads(heads: int, size: int) -> None:
    torch.manual_seed(size)
    x, weight, eps, width = torch.randn(ROWS, heads * size + 2), torch.randn(size), 1e-5, heads * size + 2
    expected = x.double()
    expected[:, : heads * size] = normed(x[:, : heads * size].unflatten(1, (heads, size)), weight, eps).flatten(1)

    def compute(first: int, last: int) -> Tensor:
        own = x[first:last].clone()
        run(
            "norm", layers.NORM, len(own), x=own, x_stride=width, out=own, out_stride=width, weight=weight, heads=heads,
            size=size, eps=eps,
        )  # fmt: skip
        return own

    assert_rows(compute, expected)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [5, 96])
def test_sums(in_place: bool, size: int) -> None:
    torch.manual_seed(size)
    x, change, scale = torch.randn(ROWS, size), torch.randn(ROWS, size + 4), 0.6

    def compute(first: int, last: int) -> Tensor:
        own, other = x[first:last].clone(), change[first:last]
        out = own if in_place else torch.empty(last - first, size)
        run(
            "add", layers.ADD, len(own), x=own, change=other, change_stride=size + 4, out=out, size=size, scale=scale
        )  # fmt: skip
        return out

    assert_rows(compute, x.double() + scale * change[:, :size].double())


@pytest.mark.parametrize(("heads", "size", "half"), [(1, 2, 1), (3, 16, 8), (2, 21, 5)])
def test_rotary_positions(heads: int, size: int, half: int) -> None:
    """Those of whole heads, and of a part of each."""
    torch.manual_seed(size)
    width = heads * size + 3
    x, (cos, sin) = torch.randn(ROWS, width), torch.randn(2, ROWS, 2 * half)
    parts = x[:, : heads * size].unflatten(1, (heads, size)).double()
    low, high, factors, others = parts[..., :half], parts[..., half : 2 * half], cos.double(), sin.double()
    rotated = parts.clone()
    rotated[..., : 2 * half] = torch.cat([low, high], -1) * factors[:, None]
    rotated[..., : 2 * half] += torch.cat([-high, low], -1) * others[:, None]
    expected = torch.cat([rotated.flatten(1), x[:, heads * size :].double()], dim=1)

    def compute(first: int, last: int) -> Tensor:
        own, tables = x[first:last].clone(), [part[first:last] for part in (cos, sin)]
        run(
            "rotate", layers.ROTATE, len(own), x=own, x_stride=width, heads=heads, size=size, half=half,
            cos=tables[0], sin=tables[1],
        )  # fmt: skip
        return own

    assert_rows(compute, expected)


def test_every_activation_has_a_gate() -> None:
    assert {*GATES} == {*KNOWN_ACTIVATIONS} == {*ACTIVATIONS}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("size", [7, 301])
def test_gates(name: str, size: int) -> None:
    torch.manual_seed(size)
    gate = torch.linspace(-12, 12, ROWS * size).view(ROWS, size)
    gate[0, :5] = torch.tensor([0.0, -200.0, 200.0, -1e-20, 1e-20])
    x = torch.cat([gate, torch.randn(ROWS, size), torch.zeros(ROWS, 2)], dim=1)

    def compute(first: int, last: int) -> Tensor:
        own, out = x[first:last], torch.empty(last - first, size)
        run(f"gate_{name}", layers.GATE, len(own), x=own, x_stride=2 * size + 2, out=out, size=size)
        return out

    assert_rows(compute, ACTIVATIONS[name](gate.double()) * x[:, size : 2 * size].double())


@pytest.mark.parametrize("name", GATES)
def test_gates_of_inputs_that_are_not_finite(name: str) -> None:
    gate = torch.tensor([float("nan"), float("inf"), 1.0])
    out = torch.empty(1, 3)
    run(f"gate_{name}", layers.GATE, 1, x=torch.cat([gate, torch.ones(3)]), x_stride=6, out=out, size=3)
    assert torch.equal(out[0].isnan(), torch.tensor([True, False, False])) and out[0, 1] == float("inf")


@pytest.mark.parametrize("size", [5, 16])
def test_keys_and_values_are_stored_where_their_positions_are(size: int) -> None:
    torch.manual_seed(size)
    groups, past, capacity, first = 2, 4, 20, 3 * size
    x = torch.randn(ROWS, first + 2 * groups * size + 1)
    cache = torch.zeros(2, groups, capacity, size)
    run(
        "store", layers.STORE, ROWS, x=x, x_stride=x.shape[1], first=first, keys=cache[0], values=cache[1],
        group_stride=cache.stride(1), groups=groups, size=size, past=past,
    )  # fmt: skip
    expected = torch.zeros_like(cache)
    parts = x[:, first:-1].unflatten(1, (2, groups, size))  # (rows, 2, groups, size)
    expected[:, :, past : past + ROWS] = parts.permute(1, 2, 0, 3)
    assert torch.equal(cache, expected)


def attended(query: Tensor, keys: Tensor, values: Tensor, past: int, window: int, scaling: float) -> Tensor:
    """Queries (rows, heads, D) over keys (groups, past + rows, D)."""
    repeats, rows = query.shape[1] // len(keys), torch.arange(past, past + len(query))
    keys, values = (part.double().repeat_interleave(repeats, dim=0) for part in (keys, values))
    scores = query.double().transpose(0, 1) @ keys.mT * scaling
    distance = rows[:, None] - torch.arange(keys.shape[1])
    scores = scores.masked_fill((distance < 0) | (distance >= (window or len(distance) + past)), -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)


# heads, groups, size of a head, past positions, window (0: none)
ATTENTIONS = [
    (4, 4, 16, 0, 0),
    (6, 2, 24, 60, 0),
    (3, 1, 5, 200, 0),
    (4, 2, 16, 70, 11),
    (2, 1, 80, 3, 5),
    (1, 1, 1, 2, 1),
]


@pytest.mark.parametrize(("heads", "groups", "size", "past", "window"), ATTENTIONS)
def test_attention(heads: int, groups: int, size: int, past: int, window: int) -> None:
    torch.manual_seed(past)
    capacity, scaling, width = past + ROWS + 5, 1.3 / size**0.5, heads * size + 7
    query = torch.randn(ROWS, width)
    keys, values = torch.randn(2, groups, capacity, size)
    keys[:, past // 2] *= 30  # scores of several hundred
    keys[:, past + ROWS :] = values[:, past + ROWS :] = float("nan")  # of no position yet
    repeats = heads // groups

    def compute(first: int, last: int, parts: int = 3) -> Tensor:
        own, out, count = query[first:last], torch.empty(last - first, heads * size), (last - first) * repeats
        parts = min(parts, count)
        run(
            "attention", layers.ATTENTION, groups * parts, head=size, query=own, query_stride=width, keys=keys,
            values=values, group_stride=keys.stride(0), out=out, heads=heads, repeats=repeats, past=past + first,
            window=window, queries=count, parts=parts, scaling=scaling,
        )  # fmt: skip
        return out

    end = past + ROWS
    rows = query[:, : heads * size].unflatten(1, (heads, size))
    assert_rows(compute, attended(rows, keys[:, :end], values[:, :end], past, window, scaling))
    for parts in (1, 2, 8):
        assert torch.equal(compute(0, ROWS, parts), compute(0, ROWS))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama of odd sizes", {"hidden_size": 42, "head_dim": 14, "num_key_value_heads": 1}),
        ("gemma3_text", {"sliding_window": 5, "head_dim": 10, "num_attention_heads": 8}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.0}}),
    ],
)
@torch.no_grad()
def test_batches_of_models_with_odd_heads(name: str, fields: dict[str, int]) -> None:
    """Passes of several widths over several texts, the later ones from a cache."""
    model, exact = tiny_model(name, **fields), tiny_model(name, **fields).double()
    torch.manual_seed(1)
    texts = torch.randint(160, (3, 40))
    assert InvariantEngine([model], [], AS_LOADED).install() == ""
    session, ends = ModelSession(model), (0, 4, 5, 20, 23, 40)
    found = [session.feed_rows(texts[:, :end].tolist(), keep=end - start) for start, end in pairwise(ends)]
    expected = exact(texts).logits
    assert float((torch.cat(found, dim=1) - expected).abs().max() / expected.std()) < 1e-5
