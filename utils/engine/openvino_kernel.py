"""A `Kernel` for single linear layers, computed by OpenVINO: of draft heads, for example."""

from collections.abc import Iterator

from torch import Tensor

from utils.engine.openvino_requests import BOUND_ROWS, run_chunks
from utils.engine.openvino_runtime import compile_graph, ops, ov
from utils.engine.openvino_weights import FLOAT, Weight, constant, dynamic_group, mark_dynamic_group, multiplied
from utils.engine.weight_blocks import BlockWeight


class OpenVinoKernel:
    """float32, or small integers with scales, on a CPU. OpenVINO has a copy of the weight in a layout of its own."""

    def __init__(self, weight: Weight, bias: Tensor | None, *, threads: int = 1) -> None:
        """weight: (N, K). bias: (N,)."""
        self._weight = weight if isinstance(weight, BlockWeight) else weight.detach().float()
        self._bias = None if bias is None else bias.detach().float()
        x = ops.parameter(ov.PartialShape([-1, weight.shape[1]]), FLOAT)
        y = multiplied(x, self._weight)
        graph = ov.Model([y if self._bias is None else ops.add(y, constant(self._bias[None]))], [x], "linear")
        mark_dynamic_group(graph, dynamic_group([self._weight]))
        self._request = compile_graph(graph, threads).create_infer_request()

    def __call__(self, x: Tensor) -> Tensor:
        rows, outputs = x.reshape(-1, x.shape[-1]).float(), self._weight.shape[0]
        if not len(rows):
            return x.new_empty(*x.shape[:-1], outputs)
        return run_chunks(self._request, [rows], [(outputs,)], BOUND_ROWS)[0].view(*x.shape[:-1], outputs)

    def weight(self) -> Tensor:
        return self._weight.dense() if isinstance(self._weight, BlockWeight) else self._weight

    def tensors(self) -> Iterator[Tensor]:
        weight, blocks = (None, self._weight) if isinstance(self._weight, BlockWeight) else (self._weight, None)
        stored = (blocks.values, blocks.scales, blocks.minimums) if blocks else (weight,)
        yield from (part for part in (*stored, self._bias) if part is not None)
