"""Defaults of a request, and checks before anything is loaded: options that exclude each other."""

from __future__ import annotations

from dataclasses import replace

from utils.errors import UserError
from utils.pairs.request import EMBEDDED, LAYERS, PairRequest


def with_defaults(request: PairRequest, device: str, drafter_device: str) -> PairRequest:
    """The request with existing devices and the default quantizations filled in."""

    def default(device: str) -> str:
        return request.cuda_quantize if device.startswith("cuda") else "none"

    return replace(
        request,
        device=device,
        drafter_device=drafter_device,
        quantize=request.quantize or default(device),
        drafter_quantize=request.drafter_quantize or default(drafter_device),
    )


def check_request(request: PairRequest) -> None:
    """Raise UserError for options that exclude each other. The defaults must be filled in."""
    if request.target.startswith(LAYERS):
        raise UserError(f"'{request.target}' is not a target: layers:K can only be a --drafter.")
    if request.drafter is None or request.drafter.startswith(LAYERS):
        shares = "A layers:K drafter shares the weights of the target"
        if request.drafter_quantize != "none":
            raise UserError(f"{shares}: leave --drafter-quantize out and use --quantize.")
        if request.drafter_device != request.device:
            raise UserError(f"{shares}: leave --drafter-device out.")
    layer_count(request.drafter)
    if request.engine_weights != "float32":
        _check_engine_weights(request)


def layer_count(drafter: str | None) -> int | None:
    """The K of a `layers:K` drafter, None for other drafters. Raises UserError if K is not a whole number."""
    if drafter is None or not drafter.startswith(LAYERS):
        return None
    count = drafter.removeprefix(LAYERS)
    # int() would also accept signs, blanks, underscores and digits of other scripts.
    if not (count.isascii() and count.isdigit()):
        raise UserError(f"'{drafter}' is not a drafter: write layers:K with a whole number, for example layers:4.")
    return int(count)


def _check_engine_weights(request: PairRequest) -> None:
    """Raise UserError for a format of --engine-weights in which no engine computes the requested target."""
    kind = f"--engine-weights {request.engine_weights}"
    if request.device != "cpu":
        raise UserError(f"{kind} is computed on CPUs only: use --device cpu, or --quantize on {request.device}.")
    if request.dtype not in ("auto", "float32"):
        raise UserError(f"{kind} needs a model that is loaded in float32: leave --dtype out.")
    if request.quantize != "none":
        raise UserError(f"{kind} needs a target that is not quantized: leave --quantize out.")
    if request.engine_weights == "gguf" and not (
        request.target == EMBEDDED or request.target.lower().endswith(".gguf")
    ):
        raise UserError(
            f"{kind} needs a target from a GGUF file, and '{request.target}' is not one: use --engine-weights int4 "
            "or int8, or name a .gguf file."
        )
