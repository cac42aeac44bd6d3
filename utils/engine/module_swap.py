"""Exchanging a model's linear layers for kernels, and back.

Layers that read the same input (q, k, v; gate, up) become one kernel: a call costs as much as a small product. Models that share weights
go on sharing them. Quantized layers are not nn.Linear, and are left alone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from utils.engine.kernels import Kernel

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

Build = Callable[[Tensor, Tensor | None], Kernel | None]
Place = tuple[nn.Module, str]  # a parent and the name of its child


class Fused:
    """One product for several layers: the first to be asked computes it, the others find theirs if they are asked about the same input."""

    def __init__(self, kernel: Kernel, sizes: Sequence[int]) -> None:
        self.kernel, self.sizes = kernel, list(sizes)
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def output(self, x: Tensor, index: int) -> Tensor:
        """What layer `index` makes of x."""
        if x is not self._input:
            self._input, self._outputs = x, self.kernel(x).split(self.sizes, dim=-1)
        mine = self._outputs[index]
        if index == len(self.sizes) - 1:  # the last in order: nothing is held longer than needed
            self._input, self._outputs = None, ()
        return mine


class EngineLinear(nn.Module):
    """A linear layer that a kernel computes, alone or as part of one.

    held: the layer's weight where something else holds it too (a tied embedding), and its bias, for the way back.
    """

    def __init__(self, fused: Fused, index: int, layer: nn.Linear, *, tied: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.fused, self.index = fused, index
        self.held = (layer.weight if tied else None, layer.bias)  # in a tuple they are nobody's parameters

    def forward(self, x: Tensor) -> Tensor:
        return self.fused.kernel(x) if len(self.fused.sizes) == 1 else self.fused.output(x, self.index)

    @property
    def weight(self) -> Tensor:
        """The weight (N, K), made anew at every look."""
        return self.fused.kernel.weight().split(self.fused.sizes)[self.index]


@dataclass(slots=True)
class _Site:
    """Layers that become one kernel, and for each of them its places in the models that share it."""

    layers: list[nn.Linear]
    places: list[tuple[Place, ...]]


def swap(models: Iterable[nn.Module], build: Build) -> int:
    """Exchange every nn.Linear that `build` makes a kernel of; how many layers were left as they were."""
    models = list(models)
    embedded = {id(module.weight) for model in models for module in model.modules() if isinstance(module, nn.Embedding)}
    sites, left = _sites(models), 0
    while sites:
        _, site = sites.popitem()  # weights go on the way, but for those that are a mapped file: that goes at the end
        kernel = _build(site.layers, build)
        if kernel is None:
            left += len(site.layers)
            continue
        fused = Fused(kernel, [layer.out_features for layer in site.layers])
        for places in site.places:
            for index, (layer, (parent, name)) in enumerate(zip(site.layers, places, strict=True)):
                setattr(parent, name, EngineLinear(fused, index, layer, tied=id(layer.weight) in embedded))
    _let_go_of_files(models)
    return left


def restore(models: Iterable[nn.Module]) -> None:
    """Put nn.Linear layers back; weights that were shared are shared again."""
    made: dict[tuple[int, int], Any] = {}
    for model in models:
        for parent, name, child in [*_children(model)]:
            if isinstance(child, EngineLinear):
                key, (tied, bias) = (id(child.fused), child.index), child.held
                if key not in made:
                    made[key] = nn.Parameter(child.weight.contiguous(), requires_grad=False) if tied is None else tied
                layer = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
                layer.weight, layer.bias = made[key], bias
                setattr(parent, name, layer)


def _let_go_of_files(models: list[nn.Module]) -> None:
    """Copy what is left into memory of its own: one small tensor would keep a whole checkpoint file mapped and resident."""
    seen: set[int] = set()
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in seen and tensor.device.type == "cpu":
                seen.add(id(tensor))
                tensor.data = tensor.data.clone()


def _build(layers: list[nn.Linear], build: Build) -> Kernel | None:
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    if len(layers) == 1:
        return build(layers[0].weight, layers[0].bias)
    return build(torch.cat([layer.weight for layer in layers]), torch.cat(biases) if biases else None)


def _sites(models: list[nn.Module]) -> dict[tuple[int, ...], _Site]:
    """Every group of layers once, by the identity of its weights."""
    sites: dict[tuple[int, ...], _Site] = {}
    for model in models:
        for parent in model.modules():
            for names in _groups(parent):
                layers = [parent.get_submodule(name) for name in names]
                key = tuple(id(layer.weight) for layer in layers)
                site = sites.setdefault(key, _Site(layers, []))  # type: ignore[arg-type]
                site.places.append(tuple((parent, name) for name in names))
    return sites


def _groups(parent: nn.Module) -> Iterator[tuple[str, ...]]:
    """The names of a module's linear children, those that read one input together."""
    linears = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
    for names in FUSED:
        group = [linears[name] for name in names if name in linears]
        alike = len({(layer.in_features, layer.bias is None, layer.weight.dtype) for layer in group}) == 1
        if len(group) == len(names) and alike:
            yield names
            for name in names:
                del linears[name]
    yield from ((name,) for name in linears)


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    return ((parent, name, child) for parent in model.modules() for name, child in parent.named_children())
