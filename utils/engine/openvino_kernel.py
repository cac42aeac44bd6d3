"""A `Kernel` for single linear layers, computed by OpenVINO: of draft heads, for example."""

from collections.abc import Iterator

from torch import Tensor

from utils.engine.openvino_requests import BOUND_ROWS, run_chunks, run_once
from utils.engine.openvino_runtime import DYNAMIC_GROUP, FLOAT, compile_graph, ops, ov
from utils.engine.openvino_weights import Constants, Form
from utils.engine.weight_blocks import BlockWeight


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
        run_once(compiled)
        self._constants.drop()
        self._request = compiled.create_infer_request()

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
