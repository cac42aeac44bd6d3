"""From a request to a target, its drafter and their tokenizer, ready to decode.

Options are checked before anything slow happens, and every failure is a UserError of one sentence. Decoding and warming
up are left to the caller.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from utils.decode.generation_rules import ignored_settings
from utils.decode.model_info import is_spread
from utils.decode.sliding_window import window_notes
from utils.distributed import is_tensor_parallel, world_size
from utils.engine import Engine
from utils.engine.weight_format import EngineWeights
from utils.errors import UserError
from utils.files import file_state
from utils.models import Reporter
from utils.models.checkpoints import load_model, load_tokenizer, remote_code_notes
from utils.models.devices import Placement, choose_device, choose_dtype
from utils.models.embedded import MODEL_NAME, embedded_gguf, split_digits
from utils.models.feature_drafter import FeatureDrafter
from utils.models.file_model import model_files
from utils.models.gguf import convert_if_gguf
from utils.models.gguf_blocks import UNPACKERS, GgufBlocks
from utils.models.gguf_model import InBlocks, load_in_blocks
from utils.models.load_errors import explained_errors, quiet
from utils.models.quantization import check_quantization, stored_quantization
from utils.models.sources import Source, locate
from utils.pairs.compatibility import describe_without_model
from utils.pairs.load_drafter import DrafterPlan, LoadedDrafter, LoadedTarget, load_drafter, plan_drafter
from utils.pairs.pair import Pair
from utils.pairs.request import EMBEDDED, PairRequest
from utils.pairs.request_checks import check_request, with_defaults
from utils.pairs.weights import weight_notes
from utils.prompts.chat_template import end_ids, unknown_ids


def load_pair(request: PairRequest, report: Reporter) -> Pair:
    """Load the requested pair. `report` gets a line before each slow step.

    Raises UserError for invalid options, for models that are missing, gated, damaged, too large or not supported, and
    for a drafter that cannot draft for the target.
    """
    device = choose_device(request.device)
    resolved = with_defaults(request, device, choose_device(request.drafter_device or device))
    placement = _placement(request.device, device, resolved, report)
    # As requested, not as resolved: only `auto` may spread a model, and it has been resolved to a device by now.
    drafter_name = request.drafter_device or request.device
    drafter_placement = _placement(drafter_name, str(resolved.drafter_device), resolved, report)
    check_request(resolved)
    check_quantization(str(resolved.quantize), device)
    source = _located(resolved, report)
    # Before the target is loaded, so that mistakes are reported early.
    plan = plan_drafter(resolved, drafter_placement, source)
    target = _load_target(source, resolved, placement, plan)
    drafter = load_drafter(plan, target)
    with explained_errors(target.name), quiet():
        # The request without its defaults is stored, so that /load can change a part of it and resolve the rest anew.
        pair = _pair(request, resolved, target, drafter, identity=_identity(resolved, source, plan))
    return replace(pair, notes=(*pair.notes, *weight_notes(pair)))


def _placement(name: str, device: str, resolved: PairRequest, report: Reporter) -> Placement:
    """name: the device as requested. Only `auto` may spread a model over several devices."""
    may_spread = name == "auto" and world_size() == 1
    dtype, weights = choose_dtype(resolved.dtype, device), resolved.engine_weights
    return Placement(device, dtype, report, may_spread=may_spread, engine_weights=weights)


def _located(request: PairRequest, report: Reporter) -> Source:
    """Where the target comes from: for engines that compute its blocks, the GGUF file of the embedded target."""
    if request.engine_weights == "gguf" and request.target == EMBEDDED:
        path = embedded_gguf(report)
        return Source(str(path.parent), MODEL_NAME, path.name)
    return locate(request.target, report)


def _load_target(located: Source, request: PairRequest, placement: Placement, plan: DrafterPlan) -> LoadedTarget:
    if request.engine_weights == "gguf":
        adapt = {"adapt": split_digits} if request.target == EMBEDDED else {}
        loaded = load_in_blocks(located, placement, **adapt)
        if isinstance(loaded, InBlocks):
            with explained_errors(located.name):
                end_ids(loaded.model, loaded.tokenizer)
            weights = _shipped(loaded.blocks, located)
            return LoadedTarget(located.name, loaded.model, loaded.tokenizer, str(request.quantize), weights)
        placement.report(f"{located.name} is unpacked to float32 when it is loaded: {loaded}")
    source, quantize = convert_if_gguf(located, placement), str(request.quantize)
    where = replace(placement, tensor_parallel=is_tensor_parallel())
    model = load_model(source, quantize, where, drafts_with=plan.target_prefix)
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise UserError(
            f"'{source.name}' has no tokenizer: copy tokenizer.json and tokenizer_config.json next to the weights."
        )
    with explained_errors(source.name):
        end_ids(model, tokenizer)  # invalid end ids must be reported before a drafter is loaded, which is not to blame
        weights = _engine_weights(request.engine_weights, located, model)
    return LoadedTarget(source.name, model, tokenizer, quantize, weights)


def _engine_weights(kind: str, source: Source, model: PreTrainedModel) -> EngineWeights:
    """kind: one of ENGINE_WEIGHTS. source: as it was named, before the conversion of a GGUF file."""
    if kind != "gguf":
        return EngineWeights(kind)
    return _shipped(GgufBlocks(Path(source.location, str(source.gguf)), model), source)


def _shipped(blocks: GgufBlocks, source: Source) -> EngineWeights:
    if not blocks:
        raise UserError(
            f"'{source.name}' has no weights in {', '.join(UNPACKERS)}, which --engine-weights gguf needs: use "
            "--engine-weights int4 or int8."
        )
    return EngineWeights("gguf", blocks)


def _pair(
    request: PairRequest, resolved: PairRequest, target: LoadedTarget, drafter: LoadedDrafter, *, identity: str
) -> Pair:
    model, tokenizer, name = target.model, target.tokenizer, target.name
    own_notes = remote_code_notes(model, name) + ignored_settings(model, name) + window_notes(model, name)
    own_notes += unknown_ids(model, tokenizer, name)
    return Pair(
        target=model,
        drafter=drafter.model,
        tokenizer=tokenizer,
        end_ids=end_ids(model, tokenizer),
        target_name=name,
        drafter_name=drafter.name,
        drafter_kind=drafter.kind,
        device=_device_of(model, str(resolved.device)),
        drafter_device=None if drafter.model is None else _device_of(drafter.model, str(resolved.drafter_device)),
        dtype=str(model.dtype).removeprefix("torch."),
        quantize=stored_quantization(model.config) or target.quantize,
        drafter_quantize=drafter.quantize,
        drafter_dtype=None if drafter.model is None else str(drafter.model.dtype).removeprefix("torch."),
        engine=_engine(model, drafter.model, replace(target.weights, drafter_blocks=drafter.blocks), identity),
        notes=own_notes + drafter.notes,
        request=request,
        drafter_tokenizer=drafter.tokenizer,
        compatibility=drafter.compatibility
        or describe_without_model(
            model, tokenizer, drafter.name, reads_states=isinstance(drafter.model, FeatureDrafter)
        ),
    )


def _device_of(model: PreTrainedModel | FeatureDrafter, device: str) -> str:
    """The device, or all devices on which accelerate keeps layers."""
    if not is_spread(model):
        return device
    layers: dict[str, int | str] = model.hf_device_map  # type: ignore[assignment]  # set by accelerate
    devices = (f"cuda:{entry}" if isinstance(entry, int) else str(entry) for entry in layers.values())
    return " + ".join(dict.fromkeys(devices))


def _engine(
    target: PreTrainedModel,
    drafter: PreTrainedModel | FeatureDrafter | None,
    weights: EngineWeights,
    identity: str,
) -> Engine:
    if isinstance(drafter, FeatureDrafter):
        return Engine([target], helpers=[drafter], weights=weights, identity=identity)
    return Engine([target, *([drafter] if drafter else [])], weights=weights, identity=identity)


def _identity(request: PairRequest, source: Source, plan: DrafterPlan) -> str:
    """What stored results of an engine belong to: the files of the models, and how they are loaded."""
    files = [*model_files(source), *([] if plan.source is None else model_files(plan.source))]
    files += sorted(plan.head.iterdir()) if plan.head else []
    options = (request.drafter, request.dtype, request.quantize, request.drafter_quantize, request.device)
    return "\n".join([*map(file_state, files), *map(str, options)]) if files else ""
