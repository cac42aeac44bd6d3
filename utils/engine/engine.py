"""Engine: how the loaded models are computed, and what can be promised of it.

`plain` is PyTorch as it comes. `invariant` exchanges linear layers and attention for ones whose rows do not depend on their company, so
that a verify window gives exactly the logits of single steps, and is held to it by a self-test. `auto` takes that where it is also the
faster one: on a CPU, in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from utils.decode.kv_cache import growing_cache
from utils.decode.model_session import is_spread
from utils.distributed import told
from utils.engine import attention, selftest, threads
from utils.engine.forward_timing import REPEATS, Pace, window_costs
from utils.engine.kernels import Blocked, Bytes, Kernel, packing
from utils.engine.module_swap import EngineLinear, restore, swap
from utils.errors import UserError
from utils.freed_memory import give_back_memory


@dataclass(frozen=True, slots=True)
class EngineState:
    """kind: "plain" or "invariant". weights: "float32", "int8", ... as the engine holds them. verified: whether the self-test passed.

    reason: why not, or why this kind.
    """

    kind: str
    weights: str
    verified: bool
    threads: int
    reason: str = ""

    def sentence(self) -> str:
        """One line for the screen."""
        several = "s" if self.threads > 1 else ""
        promise = "verified" if self.verified else f"not promised ({self.reason})"
        return f"{self.kind}, {self.weights} weights, {self.threads} thread{several}; bit-identical: {promise}"

    def figures(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


class Engine:
    """The models of a pair, and how they are computed at the moment.

    models: the target, then the drafter where there is one. bytewise: hold their linear weights in one byte each (on a CPU), for good.
    helpers: modules that are computed the same way, but of whose bits nothing is promised: a head, whose drafts are judged anyway.
    """

    def __init__(self, models: Sequence[Any], *, helpers: Sequence[nn.Module] = (), bytewise: bool = False) -> None:
        self._models, self._helpers = list(models), list(helpers)
        self._plain_attention = [model.config._attn_implementation for model in self._models]
        target = self._models[0]
        self._bytewise = bytewise
        self._swapped = False
        self._tested_counts: set[int] = set()
        self.step_seconds = 0.0  # of a plain step
        self.costs: tuple[float, ...] = ()  # of windows with 1, 2, ... drafts, in plain steps, beyond the first
        self.state = EngineState("plain", _dtype(target), False, torch.get_num_threads(), "not asked for")
        if bytewise and (why := self._unfit() or self._not_auto()):
            raise UserError(f"int8 engine weights cannot be had: {why}. Leave --engine-weights out.")

    def use(self, word: str, count: int) -> EngineState:
        """Compute as `word` says (plain, invariant, auto), with `count` threads, 0 for as many as help; the state that this comes to.

        Raises UserError where `invariant` is asked for and cannot be had, or `plain` where the weights are gone; all is then as before.
        """
        if word == "plain" and self._bytewise:
            raise UserError(
                "Only the invariant engine reads weights of one byte: start without --engine-weights for the plain one."
            )
        why = "" if word == "plain" else self._unfit() or (self._not_auto() if word == "auto" else "")
        if word == "plain" or why:
            if why and word == "invariant":
                raise UserError(f"The invariant engine cannot compute {self._models[0].name_or_path}: {why}.")
            self._to_plain(f"{word}: {why}" if why else "the plain engine's rounding depends on the width of a window")
        elif self.state.kind != "invariant":
            self._to_invariant(word)
        self.set_threads(count)
        give_back_memory()
        return self.state

    def set_threads(self, count: int) -> EngineState:
        """Compute with so many threads from now on; 0: what the environment says, else as many as help."""
        before, chosen = torch.get_num_threads(), count or threads.given_threads() or 0
        try:
            pace = Pace(self._models[0])
            if chosen:
                torch.set_num_threads(chosen)
            elif self._device == "cpu":
                threads.fastest(lambda: pace.forward(1), threads.thread_counts())
            self.measure(pace)
            self._check_threads(torch.get_num_threads())
        except BaseException:  # Ctrl-C among them: as it was
            torch.set_num_threads(before)
            raise
        return self.state

    def measure(self, pace: Pace | None = None, *, repeats: int = REPEATS) -> None:
        """Take the time of steps and windows, by a pace that was set up or a new one."""
        self.step_seconds, self.costs = told(window_costs(pace or Pace(self._models[0]), repeats=repeats))

    def _check_threads(self, count: int) -> None:
        """Take note of the number of threads, and test one that has not been tested; the promise holds for those that passed."""
        why = "" if self.state.kind == "invariant" else self.state.reason
        if self.state.kind == "invariant" and count not in self._tested_counts:
            why = next(
                filter(None, (selftest.same_bits(model, [count], every_width=False) for model in self._models)), ""
            )
            if not why:
                self._tested_counts.add(count)
        self.state = replace(self.state, threads=count, verified=count in self._tested_counts, reason=why)

    @property
    def _device(self) -> str:
        return str(self._models[0].device.type)

    def _unfit(self) -> str:
        """Why the invariant engine cannot compute these models, or nothing."""
        for model in self._models:
            config = model.config.get_text_config(decoder=True)
            kinds = set(getattr(config, "layer_types", None) or ())
            if getattr(model, "tp_size", None):
                return "its layers are spread over several processes"
            if is_spread(model):
                return "its layers are spread over several devices"
            if model.config.is_encoder_decoder:
                return "it is an encoder-decoder model"
            if getattr(model, "_is_stateful", False) or kinds - {"full_attention", "sliding_attention"}:
                return "some of its layers are not full or sliding attention"
            if model.config._attn_implementation not in ("sdpa", attention.NAME):
                return f"it uses {model.config._attn_implementation} attention"
        return ""

    def _not_auto(self) -> str:
        """Why `auto` does not take the invariant engine, or nothing."""
        for model in self._models:
            if model.device.type != "cpu":
                return "the invariant engine is the faster one on CPUs only"
            if model.dtype != torch.float32:
                return "the invariant engine is the faster one in float32 only"
            linears = any(type(part) in (nn.Linear, EngineLinear) for part in model.modules())
            if (
                getattr(model, "is_quantized", False)
                or getattr(model.config, "quantization_config", None)
                or not linears
            ):
                return "quantized layers keep their own kernels"
        return ""

    def _to_plain(self, reason: str) -> None:
        if self._swapped:
            restore([*self._models, *self._helpers])
            for model, name in zip(self._models, self._plain_attention, strict=True):
                model.set_attn_implementation(name)
            self._swapped = False
        self._tested_counts = set()
        self.state = replace(self.state, kind="plain", verified=False, reason=reason)

    def _to_invariant(self, word: str) -> None:
        counts = sorted({1, threads.available_threads()})
        expected = None if self._bytewise else [selftest.prefill_logits(model) for model in self._models]
        try:
            self._swapped = True
            swap([*self._models, *self._helpers], self._builder(counts))
            for model in self._models:
                model.set_attn_implementation(attention.NAME)
            why = self._tested(expected, counts)
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
            why = str(error).partition("\n")[0] or type(error).__name__
        except KeyboardInterrupt:
            self._to_plain("interrupted")
            raise
        if why:
            if not self._bytewise:
                self._to_plain(f"{word}: the self-test failed, {why}")
            if self._bytewise or word == "invariant":
                raise UserError(
                    f"The invariant engine failed its self-test: {why}. The plain engine (/engine plain) has no such promise."
                )
            return
        self._tested_counts = set(counts)
        self.state = replace(self.state, kind="invariant", weights=self._weights(), verified=True, reason="")

    def _weights(self) -> str:
        return "int8" if self._bytewise else _dtype(self._models[0])

    def _tested(self, expected: list[Tensor] | None, counts: list[int]) -> str:
        """What the self-test of the exchanged models found, or nothing."""
        for index, model in enumerate(self._models):
            attention.asked_windows.clear()
            logits = selftest.prefill_logits(model)
            if expected is not None and selftest.far_apart(logits, expected[index]):
                return "its logits are not the plain engine's"
            if _slides(model) and not attention.asked_windows - {None}:
                return "its attention does not say how far it sees"
            # A drafter cut out of the target has been tested layer by layer with it.
            if why := selftest.same_bits(model, counts, every_width=index == 0 or not self._is_cut(model)):
                return why
        return ""

    def _is_cut(self, model: Any) -> bool:
        return bool(model.get_input_embeddings().weight is self._models[0].get_input_embeddings().weight)

    def _builder(self, counts: list[int]) -> Callable[[Tensor, Tensor | None], Kernel | None]:
        target = self._models[0]
        if self._device != "cpu" or target.dtype != torch.float32:
            return Blocked
        pack = packing(counts)
        if not self._bytewise:
            return pack
        heads = {id(model.get_output_embeddings().weight) for model in self._models}

        def build(weight: Tensor, bias: Tensor | None) -> Kernel | None:
            return pack(weight, bias) if id(weight) in heads else Bytes(weight, bias)  # the head decides the tokens

        return build


def _slides(model: Any) -> bool:
    """Whether the model's cache has layers that keep a window only."""
    return any(growing_cache(model.config).is_sliding)


def _dtype(model: Any) -> str:
    return (
        "quantized"
        if getattr(model, "is_quantized", False)
        else str(next(model.parameters()).dtype).removeprefix("torch.")
    )
