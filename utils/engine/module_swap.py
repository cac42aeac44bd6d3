"""Replace a model's linear layers by kernels, and put them back.

Layers that read the same input (q, k, v; gate, up) become one kernel, because each call costs about as much as a small
product. Models that share weights still share them afterwards. Quantized layers are not nn.Linear and are left alone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from utils.engine.compiled_products import CompiledKernel
from utils.engine.stored_weights import TableRows, origin_of, source_of
from utils.freed_memory import trim_allocator

FUSED_LAYERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
PACKED_BEFORE_TRIM = 1 << 27  # weights

# Layers that become one kernel, and where they are: their parents in the models that share them, and their names there.
_Group = tuple[list[nn.Linear], list[tuple[nn.Module, list[str]]]]
# Of layers with the same input: one for all of them, or for each.
GroupBuilder = Callable[[Sequence[nn.Linear]], list[CompiledKernel]]


class EngineLinear(nn.Module):
    """A linear layer computed by a kernel, of which it is layer `index`.

    `original` keeps what `restore_linears` needs: the bias, and the weight if it has no data or an embedding holds it.
    """

    def __init__(self, kernel: CompiledKernel, index: int, layer: nn.Linear, *, tied: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.kernel, self.index, self._dtype = kernel, index, layer.weight.dtype
        self.original = (
            layer.weight if tied or source_of(layer.weight) is not None else None,
            layer.bias,
        )  # a tuple, so that they are not registered

    def forward(self, x: Tensor) -> Tensor:
        out = self.kernel(x) if len(self.kernel.sizes) == 1 else self.kernel.output(x, self.index)
        return out.to(x.dtype)  # kernels return float32

    @property
    def weight(self) -> Tensor:
        """The weight (N, K), computed anew at every access."""
        return torch.split_with_sizes(self.kernel.weight(), self.kernel.sizes)[self.index].to(self._dtype)

    @property
    def bias(self) -> Tensor | None:
        """The bias (N,), which the kernel adds."""
        return self.original[1]


def swap_linears(models: Iterable[nn.Module], build: GroupBuilder, report: Callable[[str], None]) -> None:
    """Replace every nn.Linear by a kernel. report: shows how far that has got."""
    models = list(models)
    # A tied output head shares its weight with the embedding, which still needs it in its original layout.
    embedded = {id(module.weight) for model in models for module in model.modules() if isinstance(module, nn.Embedding)}
    groups = _groups(models)
    total, packed = len(groups), 0
    while groups:
        report(f"packing the weights: layer {total - len(groups) + 1} of {total}")
        _, (layers, places) = groups.popitem()  # so that each original weight is freed as soon as it is packed
        parts = [(kernel, index) for kernel in build(layers) for index in range(len(kernel.sizes))]
        packed += sum(layer.weight.numel() for layer in layers)
        if packed > PACKED_BEFORE_TRIM:  # what conversions have freed lies between the packed weights
            trim_allocator()
            packed = 0
        for parent, names in places:
            for layer, name, part in zip(layers, names, parts, strict=True):
                tied = id(layer.weight) in embedded
                setattr(parent, name, EngineLinear(*part, layer, tied=tied))
                if tied and isinstance(rows := origin_of(layer.weight), TableRows):
                    rows.join(part[0])


def restore_linears(models: Iterable[nn.Module]) -> None:
    """Put the nn.Linear layers back. Weights that were shared are shared again."""
    restored: dict[tuple[int, ...], Any] = {}
    for model in models:
        # A list, because modules are replaced while it is read.
        for parent, name, child in [(part, *child) for part in model.modules() for child in part.named_children()]:
            if isinstance(child, EngineLinear):
                tied, bias = child.original
                key = id(child.kernel), child.index, id(tied)
                if key not in restored:
                    own = tied is None
                    if tied is not None and isinstance(rows := origin_of(tied), TableRows):
                        rows.leave(child.kernel)
                    restored[key] = nn.Parameter(child.weight.contiguous(), requires_grad=False) if own else tied
                # On the meta device no weight is allocated that would be replaced at once.
                layer = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
                layer.weight, layer.bias = restored[key], bias
                layer.train(parent.training)
                setattr(parent, name, layer)


def _groups(models: list[nn.Module]) -> dict[tuple[int, ...], _Group]:
    """Return every group of layers once, by the identities of its weights."""
    groups: dict[tuple[int, ...], _Group] = {}
    for model in models:
        for parent in model.modules():
            for layers in _layers_by_input(parent):
                # A layer cut of the target has the same weights, so both models get the same kernel.
                key = tuple(id(layer.weight) for layer in layers.values())
                _, places = groups.setdefault(key, ([*layers.values()], []))
                places.append((parent, [*layers]))
    return groups


def _layers_by_input(parent: nn.Module) -> Iterator[dict[str, nn.Linear]]:
    """Yield a module's linear children by name, those that read the same input together."""
    linears = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
    for names in FUSED_LAYERS:
        group = {name: linears[name] for name in names if name in linears}
        # Weights are concatenated along N, which needs equal K, equal dtypes, and biases for all of them or for none.
        shapes = {(layer.in_features, layer.bias is None, layer.weight.dtype) for layer in group.values()}
        if len(group) == len(names) and len(shapes) == 1:
            yield group
            linears = {name: layer for name, layer in linears.items() if name not in names}
    yield from ({name: layer} for name, layer in linears.items())
