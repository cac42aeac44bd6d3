"""`Segments` computed by OpenVINO: a small compiled graph between each two attentions, over converted weights.

Steps and verify passes use requests that are bound to buffers once for each number of rows. Long prompts are computed
in chunks.
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.engine.decoder_spec import DecoderSpec
from utils.engine.openvino_cache import converted, graph_names
from utils.engine.openvino_requests import (
    BOUND_ROWS,
    CHUNK_ROWS,
    PREFILL_ROWS,
    BoundRequests,
    ChunkRequests,
    DecoderSizes,
)
from utils.engine.openvino_runtime import compile_graph, core, drop_mapped_pages
from utils.engine.weight_format import EngineWeights

LOADED = EngineWeights()


class OpenVinoSegments:
    """`Segments` of a decoder on the CPU. The weights of the spec are read by the constructor only."""

    prefill_rows = PREFILL_ROWS
    row_threads: int | None = 1  # two pools of threads that take turns would wait for each other

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        weights: EngineWeights = LOADED,
        threads: int,
        folder: Path | None = None,
    ) -> None:
        """folder: for converted graphs, which later starts read. With None, or if files cannot be written there, they
        are in a temporary folder, which is removed with this object.

        Raises OSError if files cannot be written to a temporary folder either.
        """
        self._sizes = DecoderSizes.of(spec)
        self._bfloat16, self._threads = weights.format == "bfloat16", threads
        self._folder = self._converted(spec, weights, folder)
        self._compile()

    def _converted(self, spec: DecoderSpec, weights: EngineWeights, folder: Path | None) -> Path:
        if folder is not None:
            with suppress(OSError):
                return converted(spec, weights, folder)
        self._temporary = tempfile.TemporaryDirectory(prefix="openvino-")
        return converted(spec, weights, Path(self._temporary.name))

    def _compile(self) -> None:
        self._bound: dict[int, BoundRequests] = {}  # by the number of rows
        self._logits = torch.empty(BOUND_ROWS[-1], self._sizes.vocabulary)  # pages that are not written take no memory
        self._graphs: list[Any] = []  # releases the former ones before others are compiled
        with ThreadPoolExecutor(self._threads) as pool:
            self._graphs += pool.map(self._compiled, self._files(".xml"))
        # Some weights are copied into OpenVINO's layout at the first use, which would be the user's first token.
        self.run_products()
        drop_mapped_pages(self._folder)
        self._blocks = ChunkRequests(self._graphs, self._sizes, BOUND_ROWS)
        self._chunks = ChunkRequests(self._graphs, self._sizes, CHUNK_ROWS)

    def _compiled(self, path: Path) -> Any:
        return compile_graph(core().read_model(path), self._threads, bfloat16=self._bfloat16)

    def run_products(self) -> None:
        """With the norms and rotary positions of the same graphs."""
        sizes = self._sizes
        x, attended = torch.zeros(1, sizes.hidden), torch.zeros(1, sizes.attended)
        table = torch.zeros(1, sizes.rotary_dim)
        self.begin(x, table, table, prefill=False)
        for layer in range(len(sizes.ropes)):
            self.advance(layer, x, attended, cos=table, sin=table, prefill=False)
        self.logits(x)

    def _files(self, suffix: str) -> list[Path]:
        return [self._folder / f"{name}{suffix}" for name in graph_names(len(self._sizes.ropes))]

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

    def set_threads(self, count: int) -> None:
        if count != self._threads:
            self._threads = count
            self._compile()

    def with_threads(self, count: int) -> "OpenVinoSegments":
        """Return the same graphs, compiled for another number of threads. Both can be used."""
        other = copy(self)
        other._threads = count
        other._compile()
        return other

    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self._files(".bin"))
