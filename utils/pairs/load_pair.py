"""From the words of the command line to a target, its drafter and their tokenizer, ready to decode.

Whatever goes wrong on the way is a UserError of one sentence. Words are checked before anything slow happens. Which decoder uses what,
and warming up, is left to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from utils.decode.generation_rules import ignored_settings
from utils.decode.model_session import is_spread
from utils.distributed import number_of, together
from utils.engine import Engine
from utils.errors import UserError
from utils.models.checkpoints import code_notes, load_model, load_tokenizer
from utils.models.devices import Placement, choose_device, choose_dtype
from utils.models.draft_head import Grafted
from utils.models.embedded import Report
from utils.models.gguf import converted
from utils.models.load_errors import explained, quiet
from utils.models.quantization import check_kind, stored_kind
from utils.models.sources import Source, locate
from utils.pairs.compatibility import Fit, own_fit
from utils.pairs.load_drafter import LoadedDrafter, cut_drafter, head_folder, head_of, separate_drafter
from utils.pairs.request import HEAD, LAYERS, PairRequest
from utils.pairs.weights import loaded_line, stored_bytes, weight_notes
from utils.prompts.chat_template import end_ids, unknown_ids

__all__ = ["Pair", "PairRequest", "load_pair"]


@dataclass(frozen=True, slots=True)
class Pair:
    """What was loaded, and the engine that computes it. `drafter_kind` is "model", "layers:K", "head" or None; `notes` are for the user.

    drafter_tokenizer: the drafter's, where it is not the target's, so that drafts must be translated.
    device, drafter_device: where their weights are; None without a drafter.
    quantize, drafter_quantize: how the weights of each are stored, a word of utils.bounds.QUANTIZATIONS. memory, drafter_memory: bytes of
    weights as they were loaded; the drafter's without those that are the target's.
    """

    target: PreTrainedModel
    drafter: PreTrainedModel | Grafted | None
    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]
    target_name: str
    drafter_name: str | None
    drafter_kind: str | None
    device: str
    drafter_device: str | None
    dtype: str
    quantize: str
    drafter_quantize: str | None
    drafter_dtype: str | None
    memory: int
    drafter_memory: int | None
    engine: Engine
    notes: tuple[str, ...]
    request: PairRequest
    fit: Fit
    drafter_tokenizer: PreTrainedTokenizerBase | None


def load_pair(request: PairRequest, report: Report) -> Pair:
    """Load what the request asks for; `report` hears a line before each slow step.

    Raises UserError for anything that cannot be had: a word that means nothing, a model that is missing, gated, damaged, too large or of
    the wrong kind, or a drafter that does not fit the target.
    """
    device = choose_device(request.device)
    other = choose_device(request.drafter_device or device)
    asked, request = request, _settled(request, device, other)
    words = (asked.device, asked.drafter_device or asked.device)
    where, drafters = (
        _placement(word, device, request.dtype, report) for word, device in zip(words, (device, other), strict=True)
    )
    depth = _check_words(request)
    if together():
        check_pair(request)
    source = _locate(request.target, str(request.quantize), where)
    head, separate = _drafter_source(
        request, depth, drafters
    )  # before the target: a wrong word should not cost a minute
    source = converted(source, where)
    target = load_model(source, str(request.quantize), replace(where, parted=together()))
    tokenizer = _own_tokenizer(source)
    with explained(source.name):
        end_ids(target, tokenizer)  # a drafter is not to blame for what is wrong with them
    if head:
        drafter = head_of(head, target, source.name)
    elif separate:
        drafter = separate_drafter(separate, str(request.drafter_quantize), drafters, target, tokenizer=tokenizer)
    else:
        drafter = cut_drafter(target, source.name, depth, str(request.quantize))
    with explained(source.name), quiet():
        pair = _told(request, asked, (source.name, target, tokenizer), drafter)
    report(loaded_line(pair))
    return replace(pair, notes=(*pair.notes, *weight_notes(pair)))


def _told(
    request: PairRequest,
    asked: PairRequest,
    loaded: tuple[str, PreTrainedModel, PreTrainedTokenizerBase],
    drafter: LoadedDrafter,
) -> Pair:
    """What is to be known about a target and its drafter."""
    name, target, tokenizer = loaded
    return Pair(
        target=target,
        drafter=drafter.model,
        tokenizer=tokenizer,
        end_ids=end_ids(target, tokenizer),
        target_name=name,
        drafter_name=drafter.name,
        drafter_kind=drafter.kind,
        device=_place_of(target, request.device),
        drafter_device=None if drafter.model is None else _place_of(drafter.model, str(request.drafter_device)),
        dtype=str(target.dtype).removeprefix("torch."),
        quantize=stored_kind(target.config) or str(request.quantize),
        drafter_quantize=drafter.quantize,
        drafter_dtype=None if drafter.model is None else str(drafter.model.dtype).removeprefix("torch."),
        memory=stored_bytes(target),
        drafter_memory=None if drafter.model is None else stored_bytes(drafter.model, besides=target),
        engine=_engine(target, drafter.model, bytewise=request.engine_weights == "int8"),
        notes=code_notes(target, name)
        + ignored_settings(target, name)
        + unknown_ids(target, tokenizer, name)
        + drafter.notes,
        request=asked,
        drafter_tokenizer=drafter.tokenizer,
        fit=drafter.fit or own_fit(target, tokenizer, drafter.name),
    )


def _settled(request: PairRequest, device: str, other: str) -> PairRequest:
    """With the devices that were chosen, and a word for each quantization."""
    unsaid = [
        request.cuda_quantize if word.startswith("cuda") and not together() else "none" for word in (device, other)
    ]
    return replace(
        request,
        device=device,
        drafter_device=other,
        quantize=request.quantize or unsaid[0],
        drafter_quantize=request.drafter_quantize or unsaid[1],
    )


def _placement(word: str, device: str, dtype: str, report: Report) -> Placement:
    return Placement(device, choose_dtype(dtype, device), report, layered=word == "auto" and number_of() == 1)


def _place_of(model: PreTrainedModel, device: str) -> str:
    """The device, or all on which accelerate keeps layers."""
    if not is_spread(model):
        return device
    return " + ".join(
        dict.fromkeys(f"cuda:{part}" if isinstance(part, int) else str(part) for part in model.hf_device_map.values())
    )


def _drafter_source(request: PairRequest, depth: int | None, where: Placement) -> tuple[Path | None, Source | None]:
    """The folder of a head, or the source of a model; neither for a cut."""
    head = head_folder(request)
    cuts = request.drafter is None or depth is not None
    return head, None if cuts or head else _locate(str(request.drafter), str(request.drafter_quantize), where)


def _own_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise UserError(
            f"'{source.name}' has no tokenizer files: copy tokenizer.json and tokenizer_config.json next to the weights."
        )
    return tokenizer


def _engine(target: PreTrainedModel, drafter: PreTrainedModel | Grafted | None, *, bytewise: bool) -> Engine:
    if isinstance(drafter, Grafted):
        return Engine([target], helpers=[drafter], bytewise=bytewise)
    return Engine([target, *([drafter] if drafter else [])], bytewise=bytewise)


def _check_words(request: PairRequest) -> int | None:
    """The K of a `layers:K` drafter, or None."""
    if request.target.startswith(LAYERS):
        raise UserError(f"'{request.target}' is no target: layers:K can only be a --drafter.")
    cut = request.drafter is None or request.drafter.startswith(LAYERS)
    if cut and request.drafter_quantize != "none":
        raise UserError(
            "A layers:K drafter shares the weights of the target: leave --drafter-quantize out and use --quantize."
        )
    if cut and request.drafter_device != request.device:
        raise UserError("A layers:K drafter shares the weights of the target: leave --drafter-device out.")
    if request.drafter is None or not cut:
        return None
    depth = request.drafter.removeprefix(LAYERS)
    # int() would also take signs, blanks, underscores and the digits of other scripts.
    if not (depth.isascii() and depth.isdigit()):
        raise UserError(f"'{request.drafter}' is no drafter: write layers:K with a whole number, for example layers:4.")
    return int(depth)


def _locate(word: str, kind: str, where: Placement) -> Source:
    check_kind(kind, where.device)
    return locate(word, where.report)


def check_pair(request: PairRequest) -> None:
    """Raise UserError for words that do not go with a spread target. Devices and quantizations are settled."""
    if request.quantize != "none":
        raise UserError(
            f"{request.quantize} weights cannot be spread over processes: leave --quantize out under torchrun."
        )
    kind = torch._C._get_accelerator().type  # where transformers will put it
    if not request.device.startswith(kind):
        raise UserError(
            f"torchrun spreads the target over {kind} devices here, not over {request.device}: leave --device out."
        )
    if request.drafter == HEAD:
        raise UserError(
            "A head reads weights of the target that torchrun spreads over processes: give another --drafter."
        )
