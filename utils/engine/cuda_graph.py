"""The CUDA graph engine: decode steps and verify passes of a few widths are recorded once and then replayed.

A replay launches all kernels of a forward pass at once. A graph repeats the same operations on the same addresses, so
buffers and graphs form a slot, which outlives the cache of a run. Prompts, batches and wide passes run eagerly on it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from utils.decode.engine_forward import MAX_WIDTH
from utils.decode.kv_cache import GrowingLayer
from utils.decode.logit_drift import logits_by_width
from utils.decode.model_info import context_length, is_spread
from utils.decode.model_session import ModelSession
from utils.engine import selftest
from utils.engine.layer_engine import BIT_IDENTICAL, PlainEngine, Report, unreported
from utils.engine.selftest import DIFFERENT_LOGITS
from utils.engine.weight_format import EngineWeights

WIDTHS = (*range(1, 10), 17)  # recorded numbers of rows; others are padded to the next one
TESTED = (*range(1, 10), 12)  # by the self-test; the last one is padded
EAGER = (18, 33, MAX_WIDTH)  # these run without a graph, and must not have other bits either
# What ModelSession passes. A call with anything else runs eagerly.
ARGUMENTS = {"input_ids", "past_key_values", "use_cache", "logits_to_keep", "output_hidden_states", "return_dict"}
SMALLEST = 512  # positions of a slot; longer ones have twice as many each time
WARM_UPS = 2  # before a recording, so that libraries choose kernels and allocate workspaces
SPARE_SLOTS = 2  # kept of each capacity; a self-test needs more at a time than a run
Outputs = tuple[Tensor, ...]


class CudaRecorder:
    """Records CUDA graphs on one device. Their temporary memory is shared, since outputs are copied after a replay."""

    device_type: ClassVar[str] = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Outputs]) -> Any:
        """Return an object whose `replay` repeats the operations of `run` on the tensors that they used. Its `outputs`
        keep their addresses and receive new values.
        """
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may allocate memory meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = run()
        return SimpleNamespace(outputs=outputs, replay=graph.replay)


class Slot:
    """The buffers of one sequence, and the graphs that were recorded on them."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.position = torch.zeros((), dtype=torch.long, device=device)  # at which a graph writes its first row
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: (1, heads, capacity, D)
        self.graphs: dict[Any, tuple[Tensor, Any]] = {}  # static input ids and graph, by what was recorded

    def room(self, layer: int, new: tuple[Tensor, Tensor], end: int) -> tuple[Tensor, Tensor] | None:
        """Return the buffers of a layer, or None if the states (B, heads, T, D) are of several rows or too long."""
        if end > self.capacity or new[0].shape[0] != 1:
            return None
        if layer not in self.buffers:
            # Zeros, because a NaN in a masked position would still make the attention of a row NaN.
            shapes = [(*part.shape[:-2], self.capacity, part.shape[-1]) for part in new]
            self.buffers[layer] = (new[0].new_zeros(shapes[0]), new[1].new_zeros(shapes[1]))
        return self.buffers[layer]


class SlotPool:
    """The slots of a model that no cache uses at the moment."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._smallest = device, SMALLEST
        self._spare: dict[int, list[Slot]] = {}

    def take(self, length: int) -> Slot:
        """Return a slot with room for `length` positions."""
        capacity = self._smallest
        while capacity < length:
            capacity *= 2
        spare = self._spare.get(capacity)
        return spare.pop() if spare else Slot(capacity, self._device)

    def give(self, slot: Slot) -> None:
        """Take a slot back."""
        spare = self._spare.setdefault(slot.capacity, [])
        if len(spare) < SPARE_SLOTS:
            spare.append(slot)

    @contextmanager
    def lengthened(self) -> Iterator[None]:
        """Begin with slots of the second length, to compare the two."""
        self._smallest = 2 * SMALLEST
        try:
            yield
        finally:
            self._smallest = SMALLEST


class SlotLayer(GrowingLayer):
    """Keys and values (B, heads, length, D) as views of a slot's buffers.

    They leave the slot for buffers of their own when it has no room for them, for example for the rows of a beam.
    """

    _layer_type = None

    def __init__(self, slot: Slot, index: int) -> None:
        super().__init__()
        self.slot, self._index = slot, index

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new positions, and return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length, new = self.get_seq_length(), (key_states, value_states)
        end = length + key_states.shape[-2]
        buffers = self.slot.room(self._index, new, end) if self.in_slot() else None
        if buffers is None:
            return super().update(key_states, value_states, *args, **kwargs)
        for buffer, part in zip(buffers, new, strict=True):
            buffer[..., length:end, :] = part
        self.extend_to(end)
        return self.keys, self.values

    def in_slot(self) -> bool:
        """Whether the keys lie in the slot, or there are none yet."""
        if not self.get_seq_length():
            return True
        buffers = self.slot.buffers.get(self._index)
        return buffers is not None and self.keys.data_ptr() == buffers[0].data_ptr()

    def extend_to(self, length: int) -> None:
        """Set the length, after positions were written to the slot."""
        self.keys, self.values = (buffer[..., :length, :] for buffer in self.slot.buffers[self._index])

    def move(self, slot: Slot, keys: Any, values: Any) -> None:
        """Continue in another slot with these keys and values, if there are any."""
        self.slot = slot
        if keys is not None and keys.numel():
            self.keys, self.values = keys[..., :0, :], values[..., :0, :]
            self.update(keys, values)


class GraphCache(DynamicCache):
    """The cache of one run. Forward passes outside a graph see views of `length` positions, as in a growing cache."""

    def __init__(self, pool: SlotPool, layers: int) -> None:
        super().__init__()
        self._pool, self.slot = pool, pool.take(1)
        self.layer_class_to_replicate = None
        self.layers = [SlotLayer(self.slot, index) for index in range(layers)]

    def __del__(self) -> None:
        self._pool.give(self.slot)

    def reserve(self, count: int) -> Slot | None:
        """Return the slot with room for `count` more positions, or None if keys have left it."""
        if not all(layer.in_slot() for layer in self.layers):
            return None
        needed, old = self.get_seq_length() + count, self.slot
        if needed > old.capacity:
            self.slot = self._pool.take(needed)
            for layer in self.layers:
                layer.move(self.slot, layer.keys, layer.values)
            self._pool.give(old)
        return self.slot

    def advance(self, count: int) -> None:
        """Add `count` positions that a graph has written."""
        length = self.get_seq_length() + count
        for layer in self.layers:
            layer.extend_to(length)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GraphCache":
        twin = GraphCache(self._pool, len(self.layers))
        twin.reserve(self.get_seq_length())
        for own, layer in zip(self.layers, twin.layers, strict=True):
            layer.move(twin.slot, own.keys, own.values)
        return twin


class RecordedLayer(DynamicLayer):
    """A layer as a graph sees it: whole buffers, and positions that only the device knows."""

    _layer_type = None
    is_compileable = True  # so that transformers masks the positions that are not filled

    def __init__(self, slot: Slot, index: int) -> None:
        super().__init__()
        self._slot, self._index, self.is_initialized = slot, index, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new positions, and return the buffers."""
        keys, values = self._slot.buffers[self._index]
        positions = self._slot.position + torch.arange(key_states.shape[-2], device=keys.device)
        keys.index_copy_(2, positions, key_states)
        values.index_copy_(2, positions, value_states)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of the keys that attention sees, and the position of the first one."""
        return self._slot.capacity, 0

    def get_seq_length(self) -> Any:
        """Return the number of earlier positions as a tensor, since a graph must not fix it."""
        return self._slot.position


def recorded_cache(slot: Slot) -> DynamicCache:
    """The cache with which a graph is recorded on a slot."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = None
    cache.layers = [RecordedLayer(slot, index) for index in sorted(slot.buffers)]
    return cache


class GraphForward:
    """Takes the place of a model's `forward`: replays a graph where there is one for the call.

    record: a CudaRecorder or its like. Graphs are recorded when they are first needed.
    """

    def __init__(self, model: PreTrainedModel, record: Any) -> None:
        self.original = model.forward
        self.__signature__ = inspect.signature(model.forward)  # sessions look for arguments that the model takes
        self._record, self._limit = record, context_length(model)
        self._layers, self.pool = len(DynamicCache(config=model.config).layers), SlotPool(model.device)
        self._parameters = self.__signature__.parameters

    def new_cache(self) -> GraphCache:
        """Return an empty cache for a session."""
        return GraphCache(self.pool, self._layers)

    def for_cut(self, cut: PreTrainedModel) -> "GraphForward":
        """Return the same for a model that was cut out of this one."""
        return GraphForward(cut, self._record)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = None if args else self._replayed(kwargs)
        return self.original(*args, **kwargs) if output is None else output

    def _replayed(self, kwargs: Mapping[str, Any]) -> CausalLMOutputWithPast | None:
        """Return the output of a replay, or None if the call has to run eagerly."""
        cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids")
        if not isinstance(cache, GraphCache) or ids is None:
            return None
        length, count = cache.get_seq_length(), ids.shape[1]
        width = next((width for width in WIDTHS if width >= count), count)
        # Padding must not reach positions for which the model has no embedding.
        fits = width <= WIDTHS[-1] and (self._limit is None or length + width <= self._limit)
        slot = cache.reserve(width if fits else count)
        # An empty cache is filled eagerly even by a short prompt, since a new slot has no buffers to record on.
        if slot is None or not fits or not length or not _is_plain_call(kwargs):
            return None
        hidden = bool(kwargs.get("output_hidden_states"))
        outputs = self._outputs(slot, ids, (width, hidden), length)
        cache.advance(count)
        keep = kwargs.get("logits_to_keep", 0)
        # Copies, because the next replay overwrites the outputs.
        logits, *states = (output[:, :count] for output in outputs)
        return CausalLMOutputWithPast(
            logits=cast(torch.FloatTensor, logits[:, -keep:].clone()),
            past_key_values=cache,
            hidden_states=cast(Any, tuple(state.clone() for state in states) if hidden else None),
        )

    def _outputs(self, slot: Slot, ids: Tensor, kind: tuple[int, bool], length: int) -> Outputs:
        """Run a graph over ids (1, T) after `length` positions. Outputs are (1, width, ...)."""
        slot.position.fill_(length)  # a kernel with an immediate value: nothing is uploaded
        if kind not in slot.graphs:
            static = ids.new_zeros((1, kind[0]))
            static[:, : ids.shape[1]] = ids
            slot.graphs[kind] = static, self._record(self._pass(slot, static, hidden=kind[1]))
        static, graph = slot.graphs[kind]
        static[:, : ids.shape[1]] = ids
        graph.replay()
        outputs: Outputs = graph.outputs
        return outputs

    def _pass(self, slot: Slot, ids: Tensor, *, hidden: bool) -> Callable[[], Outputs]:
        """Return the forward pass to record: the logits of all rows, and the hidden states."""
        arguments = {"input_ids": ids, "past_key_values": recorded_cache(slot), "use_cache": True, "return_dict": True}
        if hidden:
            arguments["output_hidden_states"] = True

        def run() -> Outputs:
            positions = slot.position + torch.arange(ids.shape[1], device=ids.device)
            # Only older versions of transformers take `cache_position`, and would compute it on the host.
            given = {"position_ids": positions[None], "cache_position": positions}
            output = self.original(
                **arguments, **{name: value for name, value in given.items() if name in self._parameters}
            )
            return (output.logits, *(output.hidden_states if hidden else ()))

        return run


def _is_plain_call(kwargs: Mapping[str, Any]) -> bool:
    """Whether a call asks for nothing but what a graph computes."""
    return (
        kwargs.keys() <= ARGUMENTS
        and kwargs.get("use_cache", True) is True
        and kwargs.get("return_dict", True) is True
        and isinstance(kwargs.get("logits_to_keep", 0), int)
        and not torch.is_grad_enabled()
    )


class CudaGraphEngine(PlainEngine):
    """Recorded forward passes of the models of a pair. helpers, such as a draft head, stay as they are.

    promise: set by `install` if the logits have the same bits at every tested width and buffer length. A replay does
    not depend on the number of CPU threads, so no further self-test is needed.
    """

    recorder: ClassVar[Any] = CudaRecorder  # replaced by tests

    def __init__(self, models: Sequence[PreTrainedModel], helpers: Sequence[nn.Module], weights: EngineWeights) -> None:
        super().__init__(models, helpers, weights)
        self._attention = [model.config._attn_implementation for model in models]  # another engine may change it
        self._replaced: list[tuple[PreTrainedModel, Any]] = []  # models, and forwards that were set on them

    def unsupported(self) -> str:
        """Return why the models cannot be computed this way."""
        if not self._format.as_loaded:
            return f"{self._format.format} engine weights are computed on CPUs only"
        if other := next((name for name in self._attention if name not in ("sdpa", "eager")), None):
            return f"it uses {other} attention"
        return next(filter(None, (_unsupported(model, self.recorder.device_type) for model in self._models)), "")

    def install(self, report: Report = unreported) -> str:
        """Replace the forward passes, record them and test them. Returns why that failed."""
        self.promise = ""
        reference = [selftest.sample_logits(model, selftest.PREFIX) for model in self._models]
        equal = True
        for model in self._models:
            forward = GraphForward(model, self.recorder(model.device))
            self._replaced.append((model, vars(model).get("forward")))
            model.forward = cast(Any, forward)
        for model, logits in zip(self._models, reference, strict=True):
            report("recording forward passes")
            if reason := _differs_from_plain(model, logits):
                return reason
            report("comparing widths and buffer lengths")
            equal = equal and _has_equal_bits(model)
        self.promise = BIT_IDENTICAL if equal else ""
        return ""

    def remove(self) -> None:
        """Put the original forward passes back."""
        for model, own in self._replaced:
            del model.forward
            if own is not None:  # of a library that had replaced it before, such as accelerate
                model.forward = own
        self._replaced = []
        super().remove()


def _unsupported(model: PreTrainedModel, device_type: str) -> str:
    """Return why a model cannot be recorded."""
    if model.device.type != device_type:
        return f"CUDA graphs need a CUDA device, and it is on {model.device.type}"
    if is_spread(model):
        return "its layers are spread over several devices"
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if not layers or layers - {DynamicLayer, DynamicSlidingWindowLayer} or getattr(model, "_is_stateful", False):
        return "some of its layers are neither full nor sliding attention"
    return ""


def _differs_from_plain(model: PreTrainedModel, reference: Tensor) -> str:
    """Describe the first width whose logits differ from those of the plain engine (POSITIONS, V) by more than
    rounding.
    """
    for width in TESTED:
        if selftest.differ_beyond_rounding(_logits(model, len(reference), width), reference):
            return f"{DIFFERENT_LOGITS} in passes of {width} tokens"
    return ""


def _has_equal_bits(model: PreTrainedModel) -> bool:
    """Whether logits have the same bits at every tested width, recorded or not, and in a buffer of another length."""
    count = MAX_WIDTH
    alone = _logits(model, count, 1)
    if not all(torch.equal(_logits(model, count, width), alone) for width in (*TESTED[1:], *EAGER)):
        return False
    pool = cast(GraphForward, model.forward).pool
    with pool.lengthened():
        return torch.equal(_logits(model, count, 1), alone)


def _logits(model: PreTrainedModel, count: int, width: int) -> Tensor:
    """Logits (count, V) of a sample text after a prefix, `width` tokens at a time."""
    context = selftest.sample_context(model, selftest.PREFIX + count)
    session, count = ModelSession(model), min(count, len(context) - 1)
    session.feed(context[: len(context) - count], keep=1)
    return logits_by_width(session, context, count, width)
