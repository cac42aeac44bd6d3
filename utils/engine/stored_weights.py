"""Weights that stay in the user's files until something computes with them.

A layer whose weight is in a file holds a placeholder: a parameter on the meta device with a source. Engines read one
layer at a time into a layout of their own, so that a weight is in memory only in the form in which it is computed.
An embedding is a RowTable: its rows are in memory in the format of their file, or in the output head that shares them.
Output heads in GGUF files are tables as well, because drafters read some of their rows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.utils._pytree import tree_map

from utils.engine.compiled_products import CompiledKernel


class WeightSource(Protocol):
    """Where the weight of a linear layer lies. name: of the layer in the model that was loaded."""

    @property
    def name(self) -> str: ...

    @property
    def itemsize(self) -> int:
        """Bytes of a value that `stored` returns."""

    def read(self) -> Tensor:
        """Return the weight (N, K) in the model's number format. Raises UserError if its file has changed."""

    def stored(self) -> Tensor:
        """Return the same values in the file's number format if that holds them. They may be a mapping of the file."""


@dataclass(frozen=True, slots=True)
class RowsOf:
    """Some rows of a weight, such as the part of a fused parameter."""

    name: str
    itemsize: int
    source: WeightSource
    rows: slice

    def read(self) -> Tensor:
        return self.source.read()[self.rows].clone()

    def stored(self) -> Tensor:
        return self.source.stored()[self.rows]


class RowSource(WeightSource, Protocol):
    """The rows of a weight (N, K). dtype: the model's number format. filled: returns the whole weight in it, if that is
    used.
    """

    dtype: torch.dtype
    shape: torch.Size
    filled: Callable[[], Tensor | None]

    @property
    def held(self) -> Tensor | None:
        """What is in memory besides kernels."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows (..., K) in the model's number format."""

    def part(self, take: Callable[[Tensor], Tensor], *, of_rows: bool) -> Tensor:
        """Return take(weight). of_rows: whether that chooses whole rows."""


class TableRows:
    """A `RowSource` of an embedding: a tensor in the number format of its file, or a kernel of the same values.

    It reads the file again where a kernel has them.
    """

    def __init__(self, file: WeightSource, dtype: torch.dtype) -> None:
        """dtype: the model's number format."""
        self._file, self.dtype, self.name, self.itemsize = file, dtype, file.name, file.itemsize
        self.values: Tensor | None = file.stored().clone()  # a copy, because files change
        self.shape, self._format = self.values.shape, self.values.dtype
        self.kernel: CompiledKernel | None = None
        self.filled: Callable[[], Tensor | None] = lambda: None

    @property
    def held(self) -> Tensor | None:
        return self.values

    def rows(self, ids: Tensor) -> Tensor:
        if self.kernel is None:
            return embedding(ids, self.stored()).to(self.dtype)
        return self.kernel.rows(ids.flatten()).to(self.dtype).view(*ids.shape, -1)

    def part(self, take: Callable[[Tensor], Tensor], *, of_rows: bool) -> Tensor:
        return take(self.stored()).to(self.dtype)

    def read(self) -> Tensor:
        filled = self.filled()
        return self.stored().to(self.dtype) if filled is None else filled.detach()

    def stored(self) -> Tensor:
        return self._file.stored() if self.values is None else self.values

    def join(self, kernel: CompiledKernel) -> None:
        """Leave the rows to a kernel that was made from them, if it holds the same values."""
        if kernel.form.kind == str(self._format).removeprefix("torch."):
            self.kernel, self.values = kernel, None

    def leave(self, kernel: CompiledKernel) -> None:
        """Keep the rows in a tensor again before a kernel is given up."""
        if self.kernel is kernel:
            self.values, self.kernel = kernel.weight().to(self._format), None


# Operations that read a part of a tensor.
_PARTS = (torch.ops.aten.index.Tensor, torch.ops.aten.slice.Tensor, torch.ops.aten.select.int)


class RowTable(Tensor):
    """A weight whose rows are in memory in another form. Other uses than reading rows convert the whole."""

    source: RowSource

    @staticmethod
    def __new__(cls, source: RowSource) -> "RowTable":
        return Tensor._make_wrapper_subclass(cls, source.shape, dtype=source.dtype, device=torch.device("cpu"))

    def __init__(self, source: RowSource) -> None:
        self.source = source

    @property
    def held(self) -> Tensor | None:
        return self.source.held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first, kwargs = args[0], kwargs or {}
        if func is torch.ops.aten.detach.default:
            return cls(first.source)
        if func is torch.ops.aten.embedding.default:
            return first.source.rows(args[1])
        if func in _PARTS:
            of_rows = not kwargs and _takes_rows(func, args)
            return first.source.part(lambda whole: func(whole, *args[1:], **kwargs), of_rows=of_rows)
        args, kwargs = tree_map(lambda part: part.source.read() if isinstance(part, cls) else part, (args, kwargs))
        return func(*args, **kwargs)


def _takes_rows(func: Any, args: Any) -> bool:
    """Whether an operation of _PARTS chooses whole rows."""
    if func is not torch.ops.aten.index.Tensor:
        return bool(args[1:2] == (0,))  # its dimension
    [first, *others] = args[1]
    return first is not None and not others and (first.dim() == 1 or first.dtype != torch.bool)


def embedded(ids: Tensor, weight: Tensor) -> Tensor:
    """Return the rows of an embedding."""
    return weight.source.rows(ids) if isinstance(weight, RowTable) else embedding(ids, weight)


def placeholder(weight: Tensor, source: WeightSource) -> nn.Parameter:
    """Return a parameter of the same shape and number format that holds no data."""
    empty = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
    with_origin(empty, source)
    return empty


def source_of(weight: Tensor) -> WeightSource | None:
    """Return where a weight lies, if it is a placeholder or a table of rows."""
    return origin_of(weight) if weight.is_meta or isinstance(weight, RowTable) else None


def origin_of(weight: Tensor) -> WeightSource | None:
    """Return where a weight lies, whether it is a placeholder or has been read; None if that is not known."""
    return getattr(weight, "source", None)


def with_origin(weight: Tensor, source: WeightSource) -> None:
    """Remember where a weight in memory was read from."""
    weight.source = source  # type: ignore[attr-defined]


def rows_of(weight: Tensor, rows: slice) -> Tensor:
    """Return some rows of a weight as a view, or a placeholder for them."""
    part, whole = weight.detach()[rows], origin_of(weight)
    if whole is None:
        return part
    source = RowsOf(whole.name, whole.itemsize, whole, rows)
    if weight.is_meta:
        return placeholder(part, source)
    with_origin(part, source)
    return part


def data(weight: Tensor) -> Tensor:
    """Return a weight, which is read if it is a placeholder."""
    source = source_of(weight)
    return weight.detach() if source is None else source.read()


def stored_data(weight: Tensor) -> Tensor:
    """Like `data`, but in the number format of its file, so that what is converted anyway is not converted twice."""
    source = source_of(weight)
    return weight.detach() if source is None else source.stored()


def with_placeholder(weight: Tensor, source: WeightSource) -> nn.Parameter:
    """Return a parameter that `release` replaces by a placeholder."""
    return _filled(placeholder(weight, source), weight)


def fill(models: Iterable[nn.Module]) -> None:
    """Read the weights of all placeholders into memory. Models that share a placeholder share its weight."""
    for model in models:
        for part, weight in _weights(model):
            if (source := source_of(weight)) is not None:
                held = weight.filled() if hasattr(weight, "filled") else None
                part._parameters["weight"] = _filled(weight, source.read()) if held is None else held
        vars(model)["_in_files"] = False


def release(models: Iterable[nn.Module]) -> None:
    """Put the placeholders back. Weights that never had one stay as they are."""
    for model in models:
        for part, weight in _weights(model):
            if (empty := getattr(weight, "empty", None)) is not None:
                part._parameters["weight"] = empty
        vars(model)["_in_files"] = in_files(model)


def in_files(model: nn.Module) -> bool:
    """Return whether weights of a model are placeholders."""
    return any(source_of(weight) is not None for _, weight in _weights(model))


def fill_before_forward(model: nn.Module, arguments: Any) -> None:
    """A hook for models with placeholders: their weights are read when transformers' own forward needs them."""
    if vars(model).get("_in_files") and "forward" not in vars(model):  # no engine computes the model
        fill([model])


fill_before_forward.keeps_outputs = True  # type: ignore[attr-defined]  # it changes nothing of what is computed


def _filled(empty: Any, weight: Tensor) -> nn.Parameter:
    held: Any = nn.Parameter(weight, requires_grad=False)
    held.empty, empty.filled = empty, ref(held)
    if isinstance(empty, RowTable):
        empty.source.filled = ref(held)
    return held  # type: ignore[no-any-return]


def _weights(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Each module with a weight of its own. A list, because weights are replaced while it is read."""
    return [(part, weight) for part in model.modules() if (weight := part._parameters.get("weight")) is not None]
