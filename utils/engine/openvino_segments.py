"""`Segments` computed by OpenVINO: a small compiled graph between each two attentions.

Steps and verify passes use requests that are bound to buffers once for each number of rows. Long prompts are computed
in chunks.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from utils.engine.decoder_spec import DecoderSpec
from utils.engine.layer_engine import Report, unreported
from utils.engine.machine import has_integer_products
from utils.engine.openvino_graph import DYNAMIC_GROUP, FLOAT, Constants, Form, GraphBuilder, compile_graph, ops, ov
from utils.engine.weight_blocks import BlockWeight
from utils.engine.weight_format import EngineWeights
from utils.freed_memory import trim_allocator

# OpenVINO keeps machine code for every number of rows, so there are few. In between, rows are added that nobody reads.
BOUND_ROWS = (*range(1, 10), 12, 16, 24, 32, 48, 65)
CHUNK_ROWS = (128, 192, 256, 384, 512)
ALL_ROWS = (*BOUND_ROWS, *CHUNK_ROWS)
PREFILL_ROWS = (32, 65, *CHUNK_ROWS)
MAX_ROUNDING = 0.05  # of results with different numbers of rows, also in bfloat16. Lost weights differ by far more

Tables = tuple[Tensor, Tensor]  # cos, sin: (rows, rotary_dim)


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """What requests need to know of a decoder. heads: of queries, keys and values. ropes: of each layer."""

    hidden: int
    attended: int
    heads: int
    head_dim: int
    rotary_dim: int
    vocabulary: int
    ropes: tuple[int | None, ...]

    @classmethod
    def of(cls, spec: DecoderSpec) -> "DecoderSizes":
        return cls(
            hidden=spec.hidden_size,
            attended=spec.heads * spec.head_dim,
            heads=spec.heads + 2 * spec.kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=spec.rotary_dim,
            vocabulary=spec.vocabulary,
            ropes=tuple(layer.rope for layer in spec.layers),
        )

    def has_qkv(self, graph: int) -> bool:
        """Whether a graph ends with the queries, keys and values of a layer, which has the graph's index."""
        return graph < len(self.ropes)


class BoundRequests:
    """Requests for one number of rows, bound to buffers that they share: a step looks up and allocates nothing.

    Layers read x from one of two buffers and write it to the other one, in turns.
    """

    def __init__(self, graphs: Sequence[Any], sizes: DecoderSizes, rows: int, logits: Tensor) -> None:
        """logits: (rows, V), the buffer of the output head."""
        self._sizes, self._logits = sizes, logits
        self._x = [torch.zeros(rows, sizes.hidden) for _ in range(2)]
        self._attended, self._normed = torch.zeros(rows, sizes.attended), torch.zeros(rows, sizes.hidden)
        self._qkv = torch.zeros(rows, sizes.heads, sizes.head_dim)
        self._tables = {rope: torch.zeros(2, rows, sizes.rotary_dim) for rope in sizes.ropes}
        self._requests = [self._bound(graph, index) for index, graph in enumerate(graphs)]
        self._held: Tensor | None = None
        self._copied: dict[int | None, Tensor] = {}

    def _bound(self, graph: Any, index: int) -> Any:
        """Return the `infer` method of a new request for graph `index`."""
        if index > len(self._sizes.ropes):
            return _bind(graph.create_infer_request(), [self._normed], [self._logits]).infer
        x, following = self._x[index - 1 & 1], self._x[index & 1]
        inputs, outputs = ([x, self._attended], [following]) if index else ([self._x[0]], [])
        if self._sizes.has_qkv(index):
            rope = self._sizes.ropes[index]
            inputs, outputs = inputs + ([] if rope is None else [*self._tables[rope]]), [*outputs, self._qkv]
        return _bind(graph.create_infer_request(), inputs, outputs).infer

    def begin(self, x: Tensor, tables: Tables) -> Tensor:
        """Return qkv of layer 0 (rows, heads, head_dim), a view of a buffer."""
        self._held, self._copied = x, {}  # objects of the last pass may hold other values by now
        self._x[0][: len(x)] = x
        return self._run(0, len(x), tables)

    def advance(self, layer: int, x: Tensor, attended: Tensor, tables: Tables) -> tuple[Tensor, Tensor | None]:
        """Return x after a layer and qkv of the next one, if there is one: views of buffers."""
        rows = len(x)
        if x is not self._held:
            self._x[layer & 1][:rows] = x
        self._attended[:rows] = attended
        qkv = self._run(layer + 1, rows, tables)
        self._held = self._x[layer + 1 & 1][:rows]
        return self._held, qkv if self._sizes.has_qkv(layer + 1) else None

    def logits(self, x: Tensor) -> Tensor:
        """Return the products of the output head: a view of its buffer."""
        self._normed[: len(x)] = x
        self._requests[-1]()
        return self._logits[: len(x)]

    def _run(self, index: int, rows: int, tables: Tables) -> Tensor:
        rope = self._sizes.ropes[index] if self._sizes.has_qkv(index) else None
        # Layers of the same kind are called with the same tables. A cut model calls its last layer without tables.
        if rope is not None and self._copied.get(rope) is not tables[0] and tables[0].numel():
            self._tables[rope][0, :rows], self._tables[rope][1, :rows] = tables
            self._copied[rope] = tables[0]
        self._requests[index]()
        return self._qkv[:rows]


class ChunkRequests:
    """Requests for any number of rows, in chunks of few sizes. Outputs are new tensors."""

    def __init__(self, graphs: Sequence[Any], sizes: DecoderSizes, chunk_rows: Sequence[int]) -> None:
        self._graphs, self._requests = graphs, [graph.create_infer_request() for graph in graphs]
        self._sizes, self._chunk_rows = sizes, chunk_rows

    def begin(self, x: Tensor, tables: Tables) -> Tensor:
        """Return qkv of layer 0: (rows, heads, head_dim)."""
        return self._run(0, [x, *self._inputs(0, len(x), tables)])[0]

    def advance(self, layer: int, x: Tensor, attended: Tensor, tables: Tables) -> tuple[Tensor, Tensor | None]:
        """Return x after a layer and qkv of the next one, if there is one."""
        outputs = self._run(layer + 1, [x, attended, *self._inputs(layer + 1, len(x), tables)])
        return outputs[0], outputs[1] if len(outputs) > 1 else None

    def logits(self, x: Tensor) -> Tensor:
        """Return the products of the output head."""
        return self._run(len(self._graphs) - 1, [x])[0]

    def _inputs(self, index: int, rows: int, tables: Tables) -> Tables | tuple[()]:
        if not self._sizes.has_qkv(index) or self._sizes.ropes[index] is None:
            return ()
        # A cut model calls its last layer without tables and ignores qkv.
        return tables if tables[0].numel() else (torch.zeros(rows, self._sizes.rotary_dim),) * 2

    def _run(self, index: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Compute graph `index` chunk by chunk."""
        outputs = run_chunks(self._requests[index], inputs, self._output_shapes(index), self._chunk_rows)
        # Every graph would keep its intermediate results of this many rows.
        self._graphs[index].release_memory()
        return outputs

    def _output_shapes(self, index: int) -> list[tuple[int, ...]]:
        sizes = self._sizes
        if index > len(sizes.ropes):
            return [(sizes.vocabulary,)]
        shapes: list[tuple[int, ...]] = [(sizes.hidden,)] if index else []
        return [*shapes, (sizes.heads, sizes.head_dim)] if sizes.has_qkv(index) else shapes


def run_once(graph: Any, rows: int) -> list[Any]:
    """Compute so many equal rows of fixed values. Returns the outputs."""
    generator = np.random.default_rng(0)
    sizes = [part.get_partial_shape()[1].get_length() for part in graph.inputs]
    inputs = [np.repeat(generator.standard_normal((1, size), np.float32), rows, axis=0) for size in sizes]
    results = graph.create_infer_request().infer(inputs)
    return [np.array(results[index]) for index in range(len(graph.outputs))]


def rows_that_pack(made: Callable[[Sequence[int]], tuple[Any, Constants]], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of rows with which a graph must run before its constants are dropped.

    OpenVINO chooses kernels by the number of rows, and may pack the weights for each of them when it first runs. Then
    what it would read later is gone, and its results would be those of other weights. made: compiles the graph, runs it
    with these numbers of rows and drops its constants, whose addresses must live as long as the graph. sizes: every
    number of rows that will be used. Raises RuntimeError if there is none with which the results stay right.
    """
    needed: tuple[int, ...] = (sizes[0],)
    for _ in range(3):
        graph, _constants = made(needed)
        exact = run_once(graph, sizes[0])
        wrong = [rows for rows in sizes if not all(map(_are_rows_of, run_once(graph, rows), exact))]
        if not wrong:
            return needed
        needed += tuple(wrong)
    raise RuntimeError("OpenVINO reads weights again after it has packed them")


def _are_rows_of(output: Any, expected: Any) -> bool:
    """Whether all rows of an output are the first row of the expected one, up to rounding."""
    difference = np.linalg.norm(output - expected[:1])
    return bool(difference <= MAX_ROUNDING * np.linalg.norm(expected[:1]) * len(output) ** 0.5)


class PackingRows:
    """With which numbers of rows graphs must run before their constants are dropped: see `rows_that_pack`.

    That depends on the types and shapes of a graph's constants and on the number of threads. So it is found out on one
    graph, and holds for all graphs that have no other constants. known: what was found out, which is added to: bits of
    the indices of ALL_ROWS by number of threads and constant.
    """

    def __init__(self, threads: int, known: dict[str, int]) -> None:
        self._threads, self._known, self._lock = threads, known, Lock()

    def of(self, graph: Any, sizes: Sequence[int], made: Callable[[Sequence[int]], tuple[Any, Constants]]) -> list[int]:
        """Return the numbers of rows for a graph that is not compiled yet. sizes, made: see `rows_that_pack`."""
        keys = {f"{self._threads} {name}" for name in _constant_kinds(graph)}
        with self._lock:  # a test uses all threads
            if not keys <= self._known.keys():
                needed = rows_that_pack(made, sizes)
                bits = sum(1 << index for index, rows in enumerate(ALL_ROWS) if rows in needed)
                self._known.update({key: bits | self._known.get(key, 0) for key in keys})
            bits = reduce(or_, (self._known[key] for key in keys))
        return [rows for index, rows in enumerate(ALL_ROWS) if bits >> index & 1]


def _constant_kinds(graph: Any) -> set[str]:
    """The types and shapes of the matrices of a graph."""
    constants = (part for part in graph.get_ordered_ops() if part.get_type_name() == "Constant")
    kinds = ((part.get_element_type(), tuple(part.get_output_shape(0))) for part in constants)
    return {f"{kind} {shape}" for kind, shape in kinds if len(shape) > 1}


def bound_rows(*, integers: bool) -> tuple[int, ...]:
    """Return the numbers of rows of steps and verify passes.

    integers: whether weights are small integers. Without instructions for their products OpenVINO computes a single row
    by another kernel, whose sums have other bits. So a row of zeros is added.
    """
    return BOUND_ROWS[1:] if integers and not has_integer_products() else BOUND_ROWS


def run_chunks(
    request: Any, inputs: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> list[Tensor]:
    """Compute all rows of the inputs in chunks of these sizes. shapes: of a row of each output."""
    rows = len(inputs[0])
    chunks = chunked(rows, sizes)
    outputs = [torch.empty(sum(chunks), *shape) for shape in shapes]
    start = 0
    for size in chunks:
        parts = [_rows(part, start, size) for part in inputs]
        _bind(request, parts, [output[start : start + size] for output in outputs]).infer()
        start += size
    return [output[:rows] for output in outputs]


def chunked(rows: int, sizes: Sequence[int]) -> list[int]:
    """Return the sizes of the chunks that hold a number of rows: the largest one, and the next one for the rest."""
    full, rest = divmod(rows, sizes[-1])
    return [sizes[-1]] * full + ([next(size for size in sizes if size >= rest)] if rest else [])


def _rows(x: Tensor, start: int, size: int) -> Tensor:
    """Rows of x, with rows of zeros after its end."""
    part = x[start : start + size]
    return (part if len(part) == size else pad(part, (0, 0, 0, size - len(part)))).contiguous()


def _bind(request: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
    """Let a request read and write tensors in place."""
    for position, tensor in enumerate(inputs):
        request.set_input_tensor(position, ov.Tensor(tensor.numpy(), shared_memory=True))
    for position, tensor in enumerate(outputs):
        request.set_output_tensor(position, ov.Tensor(tensor.numpy(), shared_memory=True))
    return request


class OpenVinoKernel:
    """float32, or small integers with scales, on a CPU. OpenVINO has a copy of the weight in a layout of its own."""

    def __init__(self, weight: Form, bias: Tensor | None, *, threads: int = 1) -> None:
        """weight: (N, K). bias: (N,)."""
        self._weight = weight if isinstance(weight, BlockWeight) else weight.detach().float()
        self._bias = None if bias is None else bias.detach().float()
        x = ops.parameter(ov.PartialShape([-1, weight.shape[1]]), FLOAT)
        self._constants = Constants()
        graph = ov.Model([self._constants.product(x, [self._weight], [self._bias])], [x], "linear")
        group = min(DYNAMIC_GROUP, self._weight.group) if isinstance(self._weight, BlockWeight) else DYNAMIC_GROUP
        compiled = compile_graph(graph, threads, group=group)
        self._sizes = bound_rows(integers=isinstance(self._weight, BlockWeight))
        for rows in self._sizes:
            run_once(compiled, rows)
        self._constants.drop()
        self._request = compiled.create_infer_request()

    def __call__(self, x: Tensor) -> Tensor:
        rows, outputs = x.reshape(-1, x.shape[-1]).float(), self._weight.shape[0]
        if not len(rows):
            return x.new_empty(*x.shape[:-1], outputs)
        return run_chunks(self._request, [rows], [(outputs,)], self._sizes)[0].view(*x.shape[:-1], outputs)

    def weight(self) -> Tensor:
        return self._weight.dense() if isinstance(self._weight, BlockWeight) else self._weight

    def tensors(self) -> Iterator[Tensor]:
        weight, blocks = (None, self._weight) if isinstance(self._weight, BlockWeight) else (self._weight, None)
        stored = (blocks.values, blocks.scales, blocks.minimums) if blocks else (weight,)
        yield from (part for part in (*stored, self._bias) if part is not None)


LOADED = EngineWeights()
BUILT_AT_ONCE = 2  # graphs, each of which holds the weights of a layer a second time while it is built


class OpenVinoSegments:
    """`Segments` of a decoder on the CPU. The weights of the spec are read only when graphs are built.

    known: what `PackingRows` found out on this machine, which is added to.
    """

    prefill_rows = PREFILL_ROWS
    row_threads: int | None = 1  # two pools of threads that take turns would wait for each other

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        weights: EngineWeights = LOADED,
        threads: int,
        known: dict[str, int] | None = None,
        report: Report = unreported,
    ) -> None:
        self._sizes, self._spec, self._weights = DecoderSizes.of(spec), spec, weights
        self._threads, self._known = threads, {} if known is None else known
        self._bound_rows = bound_rows(integers=weights.format not in ("float32", "bfloat16"))
        self.tested_rows = tuple(rows for rows in self._bound_rows if rows > 1)
        self._build(report)

    def set_threads(self, count: int, report: Report = unreported) -> None:
        """Compile the graphs for another number of threads, from weights that are read again."""
        if count != self._threads:
            self._threads = count
            self._build(report)

    def _build(self, report: Report) -> None:
        self._bound: dict[int, BoundRequests] = {}  # by the number of rows
        self._packing = PackingRows(self._threads, self._known)
        self._graphs: list[Any] = []  # releases the former ones before others are compiled
        self._constants: list[Constants] = []  # whose addresses compiled graphs still refer to
        self._logits = torch.empty(BOUND_ROWS[-1], self._sizes.vocabulary)  # pages that are not written take no memory
        count = len(self._spec.layers) + 2
        made = {1: self._made(1)}  # a whole layer, so that no test is necessary for the part that begins the first one
        with ThreadPoolExecutor(BUILT_AT_ONCE) as pool:
            try:
                others = [index for index in range(count) if index not in made]
                for index, part in zip(others, pool.map(self._made, others), strict=True):
                    made[index] = part
                    trim_allocator()  # what was read and rounded on the way
                    report(f"packing the weights: part {len(made)} of {count}")
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._graphs, self._constants = ([made[index][side] for index in range(count)] for side in (0, 1))
        self._blocks = ChunkRequests(self._graphs, self._sizes, self._bound_rows)
        self._chunks = ChunkRequests(self._graphs, self._sizes, CHUNK_ROWS)

    def _made(self, index: int) -> tuple[Any, Constants]:
        """A compiled graph that holds its weights in OpenVINO's layout alone."""
        builder = GraphBuilder(self._spec, self._weights)
        model = builder.build(index)
        # No prompt passes through the output head.
        sizes = self._bound_rows if index > len(self._spec.layers) else (*self._bound_rows, *CHUNK_ROWS)
        rows = self._packing.of(model, sizes, partial(self._sample, index))
        return self._packed(builder, model, rows), builder.constants

    def _sample(self, index: int, rows: Sequence[int]) -> tuple[Any, Constants]:
        """The same graph again, to find out with which numbers of rows it must run."""
        builder = GraphBuilder(self._spec, self._weights)
        return self._packed(builder, builder.build(index), rows), builder.constants

    def _packed(self, builder: GraphBuilder, model: Any, rows: Sequence[int]) -> Any:
        """Compile a graph, and drop its constants after it has run with these numbers of rows."""
        bfloat16 = self._weights.format == "bfloat16"
        graph = compile_graph(model, self._threads, group=builder.group, bfloat16=bfloat16)
        for count in rows:
            run_once(graph, count)  # some weights are packed only then
        builder.constants.drop()
        return graph

    def run_products(self) -> None:
        """With the norms and rotary positions of the same graphs."""
        sizes = self._sizes
        x, attended = torch.zeros(1, sizes.hidden), torch.zeros(1, sizes.attended)
        table = torch.zeros(1, sizes.rotary_dim)
        self.begin(x, table, table, prefill=False)
        for layer in range(len(sizes.ropes)):
            self.advance(layer, x, attended, cos=table, sin=table, prefill=False)
        self.logits(x)

    def _requests(self, rows: int, *, prefill: bool) -> BoundRequests | ChunkRequests:
        largest = self._bound_rows[-1]
        if rows > largest:
            return self._chunks if prefill else self._blocks
        size = next(size for size in self._bound_rows if size >= rows)
        if size not in self._bound:
            self._bound[size] = BoundRequests(self._graphs, self._sizes, size, self._logits[:size])
        return self._bound[size]

    def begin(self, x: Tensor, cos: Tensor, sin: Tensor, *, prefill: bool) -> Tensor:
        return self._requests(len(x), prefill=prefill).begin(x, (cos, sin))

    def advance(
        self, layer: int, x: Tensor, attended: Tensor, *, cos: Tensor, sin: Tensor, prefill: bool
    ) -> tuple[Tensor, Tensor | None]:
        return self._requests(len(x), prefill=prefill).advance(layer, x, attended, (cos, sin))

    def logits(self, x: Tensor) -> Tensor:
        return self._requests(len(x), prefill=False).logits(x)

    def nbytes(self) -> int:
        """Bytes of the weights. Those of float32 constants are half as many where OpenVINO packs them in bfloat16."""
        return sum(part.nbytes for part in self._constants) // (2 if self._weights.format == "bfloat16" else 1)
