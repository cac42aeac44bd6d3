"""The parts of a decoder outside attention in OpenVINO: equal to PyTorch, and row by row the same bits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from openvino_specs import (
    ACTIVATIONS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCABULARY,
    after_attention,
    norm,
    qkv,
    tiny_spec,
)
from torch import Tensor
from torch.nn.functional import linear

from utils.engine.decoder_spec import DecoderSpec, Linear
from utils.engine.openvino_engine import unsupported
from utils.engine.openvino_segments import BOUND_ROWS, OpenVinoSegments, chunked
from utils.engine.stored_weights import placeholder
from utils.engine.weight_blocks import BlockWeight, round_int4
from utils.engine.weight_format import EngineWeights

VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"biases": True},
    "norms of each head": {"query_norm": norm(HEAD_DIM, 20), "key_norm": norm(HEAD_DIM, 21)},
    "norms of all heads": {"query_norm": norm(HEADS * HEAD_DIM, 22), "key_norm": norm(KV_HEADS * HEAD_DIM, 23)},
    "a norm of the queries alone": {"query_norm": norm(HEAD_DIM, 20)},
    "norms after": {"input_norm": None, "mlp_norm": None, "attention_output_norm": norm(HIDDEN, 24)},
    "norms around": {"attention_output_norm": norm(HIDDEN, 24), "mlp_output_norm": norm(HIDDEN, 25)},
    "no positions": {"rope": None},
    "positions in half of each head": {"rotary_dim": HEAD_DIM // 2},
    "scaled residuals": {"residual_scale": 0.3},
    **{name: {"activation": name} for name in ACTIVATIONS},
}
FORMATS = [name for name in ("float32", "bfloat16", "int8", "int4", "gguf") if not unsupported(name)]


class Inputs:
    """Random inputs of a forward pass over some rows."""

    def __init__(self, rows: int, rotary_dim: int = HEAD_DIM, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(rows, HIDDEN, generator=generator)
        self.attended = torch.randn(2, rows, HEADS * HEAD_DIM, generator=generator)
        self.tables = torch.randn(2, rows, rotary_dim, generator=generator)


def forward(segments: Any, inputs: Inputs, rows: slice = slice(None), *, prefill: bool = False) -> list[Tensor]:
    """All results of both layers and the head, copied."""
    cos, sin = inputs.tables[:, rows]
    x = inputs.x[rows]
    results = [segments.begin(x, cos, sin, prefill=prefill).clone()]
    for layer in range(2):
        x, following = segments.advance(layer, x, inputs.attended[layer, rows], cos=cos, sin=sin, prefill=prefill)
        results += [x.clone(), *([] if following is None else [following.clone()])]
    return [*results, segments.logits(x).clone()]


def expected(spec: Any, inputs: Inputs) -> list[Tensor]:
    cos, sin = inputs.tables
    first = after_attention(spec, 0, inputs.x, inputs.attended[0])
    second = after_attention(spec, 1, first, inputs.attended[1])
    head = linear(second, spec.head.weight, spec.head.bias)
    return [qkv(spec, 0, inputs.x, (cos, sin)), first, qkv(spec, 1, first, (cos, sin)), second, head]


@dataclass
class InBlocks:
    """A source of a weight that a file has in blocks."""

    name: str
    block: BlockWeight

    def read(self) -> Tensor:
        return self.block.dense()


def with_blocks(spec: DecoderSpec) -> tuple[DecoderSpec, dict[str, BlockWeight]]:
    """The spec as it is read from a file that has all weights but two in blocks, and these blocks."""
    blocks: dict[str, BlockWeight] = {}

    def stored(part: Linear) -> Linear:
        blocks[part.name] = round_int4(part.weight)
        return replace(part, weight=placeholder(part.weight, InBlocks(part.name, blocks[part.name])))

    names = ("query", "key", "value", "gate", "output")
    layers = tuple(replace(layer, **{name: stored(getattr(layer, name)) for name in names}) for layer in spec.layers)
    return replace(spec, layers=layers), blocks


def built(weights: str = "float32", **changes: Any) -> OpenVinoSegments:
    spec, blocks = tiny_spec(**changes), None
    if weights == "gguf":
        spec, blocks = with_blocks(spec)
    return OpenVinoSegments(spec, weights=EngineWeights(weights, blocks), threads=1)


@pytest.fixture(scope="module", params=FORMATS)
def segments(request: pytest.FixtureRequest) -> Iterator[OpenVinoSegments]:
    yield built(request.param)


@pytest.mark.parametrize("name", VARIATIONS)
def test_float32_equals_pytorch(name: str) -> None:
    changes = VARIATIONS[name]
    spec, inputs = tiny_spec(**changes), Inputs(3, changes.get("rotary_dim", HEAD_DIM))
    results = forward(built(**changes), inputs)
    for result, exact in zip(results, expected(spec, inputs), strict=True):
        assert torch.allclose(result, exact, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("weights", FORMATS[1:])
def test_other_formats_are_close_to_float32(weights: str) -> None:
    inputs = Inputs(4)
    allowed = {"bfloat16": 0.02, "int8": 0.03}.get(weights, 0.15)
    for result, exact in zip(forward(built(weights), inputs), expected(tiny_spec(), inputs), strict=True):
        assert 0 < (result - exact).norm() < allowed * exact.norm()


def test_bits_of_a_row_do_not_depend_on_other_rows(segments: OpenVinoSegments) -> None:
    inputs = Inputs(BOUND_ROWS[-1] + 10)
    alone = [forward(segments, inputs, slice(row, row + 1)) for row in range(len(inputs.x))]
    for start, rows in [(0, 2), (3, 5), (1, 9), (7, 10), (0, 13), (2, 24), (5, 40), (0, 65), (4, 66)]:
        together = forward(segments, inputs, slice(start, start + rows))
        for row in range(rows):
            assert all(
                torch.equal(part[row], single[0]) for part, single in zip(together, alone[start + row], strict=True)
            ), f"row {row} of {rows}"


@pytest.mark.parametrize("rows", [66, 130, 600])
def test_long_prompts_are_computed_in_chunks(segments: OpenVinoSegments, rows: int) -> None:
    inputs = Inputs(rows)
    chunks, blocks = forward(segments, inputs, prefill=True), forward(segments, inputs)
    assert chunks[-1].shape == (rows, VOCABULARY)
    for chunk, block in zip(chunks, blocks, strict=True):
        assert torch.allclose(chunk, block, atol=0.05)
    single = forward(segments, inputs, slice(7, 8))  # memory was released in between
    assert all(torch.equal(part[7], one[0]) for part, one in zip(blocks, single, strict=True))


@pytest.mark.parametrize(("rows", "chunks"), [(66, [128]), (512, [512]), (513, [512, 128]), (1400, [512, 512, 512])])
def test_chunks_have_few_sizes(rows: int, chunks: list[int]) -> None:
    assert chunked(rows, (128, 256, 512)) == chunks


def test_a_cut_model_ends_after_any_layer_and_ignores_its_tables() -> None:
    spec, inputs, empty = tiny_spec(), Inputs(80), torch.empty(80, 0)
    segments = built()
    for rows in (3, 80):
        for prefill in (False, True):
            segments.begin(inputs.x[:rows], *inputs.tables[:, :rows], prefill=prefill)
            attended = inputs.attended[0, :rows]
            x, _ = segments.advance(0, inputs.x[:rows], attended, cos=empty[:rows], sin=empty[:rows], prefill=prefill)
            exact = after_attention(spec, 0, inputs.x[:rows], attended)
            assert torch.allclose(x, exact, atol=1e-4)


def test_values_that_change_in_place_between_two_passes_are_seen() -> None:
    spec, segments, inputs = tiny_spec(), built(), Inputs(2)
    x, attended, (cos, sin) = inputs.x, inputs.attended[0], inputs.tables  # the same objects in both passes
    for _ in range(2):
        queries = segments.begin(x, cos=cos, sin=sin, prefill=False)
        assert torch.allclose(queries, qkv(spec, 0, x, (cos, sin)), atol=1e-4)
        y, following = segments.advance(0, x, attended, cos=cos, sin=sin, prefill=False)
        assert torch.allclose(y, after_attention(spec, 0, x, attended), atol=1e-4)
        assert following is not None
        assert torch.allclose(following, qkv(spec, 1, y, (cos, sin)), atol=1e-4)
        for values in (x, attended, cos, sin):
            values.add_(1)


def test_another_number_of_threads_compiles_again(monkeypatch: pytest.MonkeyPatch) -> None:
    segments, inputs = built(), Inputs(3)
    before, compiled = forward(segments, inputs), []
    original = OpenVinoSegments._build
    monkeypatch.setattr(OpenVinoSegments, "_build", lambda self, report: (compiled.append(1), original(self, report)))
    segments.set_threads(1)
    assert not compiled
    segments.set_threads(2)
    assert compiled
    for result, exact in zip(forward(segments, inputs), before, strict=True):
        assert torch.allclose(result, exact, atol=1e-4)


def test_two_rotary_tables_are_not_confused() -> None:
    spec = tiny_spec()
    first, second = spec.layers
    spec = replace(spec, layers=(first, replace(second, rope=1)), ropes=spec.ropes * 2)
    segments = OpenVinoSegments(spec, threads=1)
    inputs, other = Inputs(2), Inputs(2, seed=5)
    for _ in range(2):
        segments.begin(inputs.x, *inputs.tables, prefill=False)
        cos, sin = other.tables
        x, following = segments.advance(0, inputs.x, inputs.attended[0], cos=cos, sin=sin, prefill=False)
        assert following is not None
        assert torch.allclose(following, qkv(spec, 1, x, (cos, sin)), atol=1e-4)


def test_the_weights_that_are_kept_are_counted() -> None:
    rounded = built("int8")
    assert rounded.nbytes() < 0.5 * built().nbytes()
    assert rounded._constants[-1].nbytes < 2 * VOCABULARY * HIDDEN, "the head is rounded as well"
