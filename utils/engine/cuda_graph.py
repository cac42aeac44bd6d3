"""The CUDA graph engine: decode steps and verify passes of a few widths are recorded once and then replayed.

A replay launches all kernels of a forward pass at once. A decoder that can be read is computed by a SlotDecoder, which
needs few kernels; of others the forward pass of transformers is recorded. Long prompts and batches run in that one.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from utils.decode.engine_forward import MAX_WIDTH, EngineForward, is_plain_call, read_features
from utils.decode.features import final_norm
from utils.decode.logit_drift import logits_by_width
from utils.decode.model_info import context_length
from utils.decode.model_session import ModelSession
from utils.engine import selftest
from utils.engine.graph_cache import GraphCache, Outputs, Recording, Replays, Slot, SlotPool, recorded_cache
from utils.engine.graph_decoder import SlotDecoder
from utils.engine.graph_drafter import GraphDrafter
from utils.engine.layer_engine import BIT_IDENTICAL, PlainEngine, Report, attention_problem, unreported
from utils.engine.read_decoder import read_decoder
from utils.engine.selftest import DIFFERENT_LOGITS
from utils.errors import UserError

WIDTHS = (*range(1, 10), 17)  # recorded numbers of rows; others are padded to the next one
TESTED = (*range(1, 10), 12)  # by the self-test; the last one is padded
EAGER = (18, 33, MAX_WIDTH)  # these run without a graph, and must not have other bits either
LONGER = (2, 4)  # further buffer lengths of the self-test, in units of SMALLEST; the last one has MANY_KEYS
WARM_UPS = 2  # before a recording, so that libraries choose kernels and allocate workspaces


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


class GraphForward(Replays, EngineForward):
    """Takes the place of a model's `forward`: replays a graph where there is one for the call.

    record: a CudaRecorder or its like. Graphs are recorded when they are first needed. own: compute a model that can be
    read by a SlotDecoder, also in passes that are too wide for a graph. Otherwise transformers computes all passes.
    """

    def __init__(self, model: PreTrainedModel, record: Any, *, own: bool = True) -> None:
        super().__init__(record)
        self.original = model.forward
        self.__signature__ = inspect.signature(model.forward)  # sessions look for arguments that the model takes
        self._limit = context_length(model)
        spec = read_decoder(model) if own else ""
        self.decoder = None if isinstance(spec, str) else SlotDecoder(spec)
        self._layers = len(DynamicCache(config=model.config).layers)
        self.pool = SlotPool(model.device, *([self.decoder.prepare] if self.decoder else []))
        self._takes_positions = "position_ids" in self.__signature__.parameters
        self._kinds = set[tuple[int, bool]]()  # width and hidden states of recorded passes
        self._cuts = WeakSet[GraphForward]()
        self.features: Tensor | None = None
        self._final_norm: nn.Module | None = None
        with suppress(UserError):
            self._final_norm = final_norm(model)

    def new_cache(self) -> GraphCache:
        return GraphCache(self.pool, self._layers)

    def for_cut(self, cut: PreTrainedModel) -> "GraphForward":
        forward = GraphForward(cut, self._record, own=self.decoder is not None)
        self._cuts.add(forward)
        return forward

    def prepare(self, first: int, last: int) -> None:
        """Record what passes between these positions may replay, so that no run waits for it.

        Passes with hidden states are recorded once there has been one.
        """
        if any(hidden for _, hidden in self._kinds):
            self._kinds |= {(width, True) for width in WIDTHS}
        for slot in self.pool.between(first, last + WIDTHS[-1]):
            slot.position.zero_()  # a recording writes behind it
            for kind in sorted(self._kinds) if slot.buffers else ():
                self._graph(*self._recording(slot, slot.position.new_zeros(kind[0]), kind))
        for cut in self._cuts:
            cut.prepare(first, last)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.features = None
        output = None if args else self._computed(kwargs)
        return self.original(*args, **kwargs) if output is None else output

    def _computed(self, kwargs: Mapping[str, Any]) -> CausalLMOutputWithPast | None:
        """Return the output of a replay or of the decoder, or None if transformers has to compute the call."""
        cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids")
        if not isinstance(cache, GraphCache) or ids is None:
            return None
        length, count = cache.get_seq_length(), ids.shape[1]
        width = next((width for width in WIDTHS if width >= count), count)
        # Padding must not reach positions for which the model has no embedding.
        fits = width <= WIDTHS[-1] and (self._limit is None or length + width <= self._limit)
        slot = cache.reserve(width if fits else count)
        if slot is None or len(ids) > 1 or not is_plain_call(kwargs):
            return None
        hidden, keep = bool(kwargs.get("output_hidden_states")), kwargs.get("logits_to_keep", 0)
        layers = read_features() if hidden else ()
        # transformers fills an empty cache even for a short prompt, since a new slot has no buffers to record on.
        if fits and (length or self.decoder is not None):
            slot.position.fill_(length)  # a kernel with an immediate value: nothing is uploaded
            logits, *states = self._replayed(*self._recording(slot, ids[0], (width, hidden)))
            # Copies, because the next replay overwrites the outputs.
            logits = logits[:, :count][:, -keep:].clone()
            states = [state[:, :count] if layers else state[:, :count].clone() for state in states]
        elif self.decoder is not None and count <= MAX_WIDTH:
            slot.position.fill_(length)
            logits, *states = self.decoder.pass_over(slot, ids, hidden=hidden, keep=keep)()
        else:
            return None
        cache.advance(count)
        if layers and max(layers) < len(states):
            self.features = torch.cat([states[layer] for layer in layers], dim=-1)
        return CausalLMOutputWithPast(
            logits=cast(torch.FloatTensor, logits),
            past_key_values=cache,
            hidden_states=cast(Any, tuple(states[: self._layers + 1]) if hidden else None),
        )

    def _recording(self, slot: Slot, ids: Tensor, kind: tuple[int, bool]) -> Recording:
        """A kind of pass over ids (T,) at slot.position."""
        self._kinds.add(kind)
        return slot.graphs, kind, (ids,), lambda own: self._pass(slot, own[None], hidden=kind[1])

    def _pass(self, slot: Slot, ids: Tensor, *, hidden: bool) -> Callable[[], Outputs]:
        """Return the forward pass to record: the logits of all rows, and the hidden states."""
        if self.decoder is not None:
            return self.decoder.pass_over(slot, ids, hidden=hidden)
        arguments = {"input_ids": ids, "past_key_values": recorded_cache(slot), "use_cache": True, "return_dict": True}
        norm = None
        if hidden:
            arguments["output_hidden_states"], norm = True, self._final_norm

        def run() -> Outputs:
            positions = slot.position + torch.arange(ids.shape[1], device=ids.device)
            given = {"position_ids": positions[None]} if self._takes_positions else {}
            unnormed: list[Tensor] = []
            with nullcontext() if norm is None else norm.register_forward_pre_hook(lambda _, x: unnormed.append(x[0])):
                output = self.original(**arguments, **given)
            return (output.logits, *(output.hidden_states if hidden else ()), *unnormed)

        return run


class CudaGraphEngine(PlainEngine):
    """Recorded forward passes of the models of a pair. helpers, such as a draft head, stay as they are.

    promise: set by `install` if the logits have the same bits at every tested width and buffer length. A replay does
    not depend on the number of CPU threads, so no further self-test is needed.
    """

    has_own_forward = True
    recorder: ClassVar[Any] = CudaRecorder  # replaced by tests

    def unsupported(self) -> str:
        if not self._format.as_loaded:
            return f"{self._format.format} engine weights are computed on CPUs only"
        if other := next((name for name in self._attention if name not in ("sdpa", "eager")), None):
            return f"it uses {other} attention"
        problems = (attention_problem(model, self.recorder.device_type) for model in self._models)
        return next(filter(None, problems), "")

    def install(self, report: Report = unreported) -> str:
        """Replace the forward passes, record them and test them. Returns why that failed."""
        try:
            failure = self._recorded(report)
        except RuntimeError as error:  # an operation that this GPU or this version of PyTorch does not support
            if not self.has_own_forward:
                raise
            failure = str(error).partition("\n")[0]
        if not failure:
            self.compute(self._helpers)
        return failure

    def compute(self, helpers: Sequence[nn.Module]) -> None:
        record = self.recorder(self._models[0].device)
        selftest.compile_drafters(helpers, lambda helper: GraphDrafter(helper, record))

    def _recorded(self, report: Report) -> str:
        self.promise = ""
        reference = [selftest.sample_logits(model, selftest.PREFIX) for model in self._models]
        for model in self._models:
            record = self.recorder(model.device)
            self._replace_forward(model, GraphForward(model, record, own=self.has_own_forward))
        equal = True
        for model, logits in zip(self._models, reference, strict=True):
            report("recording forward passes")
            if reason := _differs_from_plain(model, logits):
                return reason
            report("comparing widths and buffer lengths")
            equal = equal and _has_equal_bits(model)
        self.promise = BIT_IDENTICAL if equal else ""
        return ""


def _differs_from_plain(model: PreTrainedModel, reference: Tensor) -> str:
    """Describe the first width whose logits differ from those of the plain engine (POSITIONS, V) by more than
    rounding.
    """
    for width in TESTED:
        if selftest.differ_beyond_rounding(_logits(model, len(reference), width), reference):
            return f"{DIFFERENT_LOGITS} in passes of {width} tokens"
    if selftest.differ_beyond_rounding(selftest.sample_logits(model, selftest.PREFIX), reference):
        return f"{DIFFERENT_LOGITS} in a prompt"
    with cast(GraphForward, model.forward).pool.lengthened(LONGER[-1]):
        if selftest.differ_beyond_rounding(_logits(model, len(reference), 1), reference):
            return f"{DIFFERENT_LOGITS} in long buffers"
    return ""


def _has_equal_bits(model: PreTrainedModel) -> bool:
    """Whether logits have the same bits at every tested width, recorded or not, in a prompt, and in longer buffers.
    The first layer and the output head are tested at every width.
    """
    alone, pool = _logits(model, MAX_WIDTH, 1), cast(GraphForward, model.forward).pool
    if not all(torch.equal(_logits(model, MAX_WIDTH, width), alone) for width in (*TESTED[1:], *EAGER)):
        return False
    prompt = _prompt_logits(model, MAX_WIDTH, len(alone))
    if not torch.equal(prompt, alone[: len(prompt)]):
        return False
    for factor in LONGER:
        with pool.lengthened(factor):
            if not all(torch.equal(_logits(model, MAX_WIDTH, width), alone) for width in TESTED):
                return False
    return not selftest.width_dependence(model, selftest.EVERY_WIDTH, torch.get_num_threads())


def _prompt_logits(model: PreTrainedModel, length: int, count: int) -> Tensor:
    """The first of the logits (count, V) that `_logits` returns, by one pass over `length` tokens."""
    context = selftest.sample_context(model, selftest.PREFIX + length)
    prompt = context[:length]
    return ModelSession(model).feed(prompt, keep=len(prompt) - (len(context) - count))


def _logits(model: PreTrainedModel, count: int, width: int) -> Tensor:
    """Logits (count, V) of a sample text after a prefix, `width` tokens at a time."""
    context = selftest.sample_context(model, selftest.PREFIX + count)
    session, count = ModelSession(model), min(count, len(context) - 1)
    session.feed(context[: len(context) - count], keep=1)
    return logits_by_width(session, context, count, width)
