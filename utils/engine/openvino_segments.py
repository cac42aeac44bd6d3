"""`Segments` computed by OpenVINO: a small compiled graph between each two attentions.

Steps and verify passes use requests that are bound to buffers once for each number of rows. Long prompts are computed
in chunks.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from utils.engine.decoder_spec import DecoderSpec
from utils.engine.layer_engine import Report, unreported
from utils.engine.openvino_graph import GraphBuilder
from utils.engine.openvino_requests import (
    BOUND_ROWS,
    CHUNK_ROWS,
    PREFILL_ROWS,
    BoundRequests,
    ChunkRequests,
    DecoderSizes,
    run_once,
)
from utils.engine.openvino_runtime import compile_graph
from utils.engine.openvino_weights import Constants
from utils.engine.weight_format import EngineWeights
from utils.freed_memory import trim_allocator

LOADED = EngineWeights()
BUILT_AT_ONCE = 2  # graphs, each of which holds the weights of a layer a second time while it is built


class OpenVinoSegments:
    """`Segments` of a decoder on the CPU. The weights of the spec are read only when graphs are built."""

    prefill_rows = PREFILL_ROWS
    row_threads: int | None = 1  # two pools of threads that take turns would wait for each other

    def __init__(
        self, spec: DecoderSpec, *, weights: EngineWeights = LOADED, threads: int, report: Report = unreported
    ) -> None:
        self._sizes, self._spec, self._weights = DecoderSizes.of(spec), spec, weights
        self._threads = threads
        self._build(report)

    def set_threads(self, count: int, report: Report = unreported) -> None:
        """Compile the graphs for another number of threads, from weights that are read again."""
        if count != self._threads:
            self._threads = count
            self._build(report)

    def _build(self, report: Report) -> None:
        self._bound: dict[int, BoundRequests] = {}  # by the number of rows
        self._graphs: list[Any] = []  # releases the former ones before others are compiled
        self._constants: list[Constants] = []  # whose addresses compiled graphs still refer to
        self._logits = torch.empty(BOUND_ROWS[-1], self._sizes.vocabulary)  # pages that are not written take no memory
        count = len(self._spec.layers) + 2
        with ThreadPoolExecutor(BUILT_AT_ONCE) as pool:
            try:
                for graph, constants in pool.map(self._made, range(count)):
                    self._graphs.append(graph)
                    self._constants.append(constants)
                    trim_allocator()  # what was read and rounded on the way
                    report(f"packing the weights: part {len(self._graphs)} of {count}")
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._blocks = ChunkRequests(self._graphs, self._sizes, BOUND_ROWS)
        self._chunks = ChunkRequests(self._graphs, self._sizes, CHUNK_ROWS)

    def _made(self, index: int) -> tuple[Any, Constants]:
        """A compiled graph that holds its weights in OpenVINO's layout alone."""
        builder, bfloat16 = GraphBuilder(self._spec, self._weights), self._weights.format == "bfloat16"
        graph = compile_graph(builder.build(index), self._threads, group=builder.group, bfloat16=bfloat16)
        run_once(graph)  # some weights are packed only then
        builder.constants.drop()
        return graph, builder.constants

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
        largest = BOUND_ROWS[-1]
        if rows > largest:
            return self._chunks if prefill else self._blocks
        size = next(size for size in BOUND_ROWS if size >= rows)
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
        """Bytes of the weights."""
        return sum(part.nbytes for part in self._constants)
