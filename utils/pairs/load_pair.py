"""From a request to a target, its drafter and their tokenizer, ready to decode.

The drafter is a head, a separate model, the first layers of the target, or none.

Options are checked before anything slow happens, and every failure is a UserError of one sentence. Decoding and warming
up are left to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from utils.decode.generation_rules import ignored_settings
from utils.decode.layer_cut import default_depth, first_layers
from utils.decode.model_info import is_spread
from utils.decode.sliding_window import window_notes
from utils.drafter_formats.checkpoint import DrafterCheckpoint, read_checkpoint
from utils.drafter_formats.formats import DrafterFormat, format_of
from utils.drafter_formats.mtp import load_mtp, mtp_layers, no_layers
from utils.drafter_formats.pard import masked_block, pard_notes
from utils.engine import Engine
from utils.engine.weight_format import EngineWeights
from utils.errors import UserError
from utils.files import file_state
from utils.models import Reporter
from utils.models.checkpoints import load_model, load_tokenizer, optional_tokenizer, remote_code_notes
from utils.models.devices import Placement, choose_device, choose_dtype
from utils.models.embedded import EMBEDDED_HEAD, MODEL_NAME, embedded_gguf, split_digits
from utils.models.feature_drafter import FeatureDrafter, Origin
from utils.models.file_model import model_files
from utils.models.gguf_blocks import UNPACKERS, GgufBlocks
from utils.models.gguf_model import InBlocks, convert_if_gguf, load_in_blocks
from utils.models.head_file import is_head, load_head
from utils.models.load_errors import explained_errors, quiet
from utils.models.quantization import check_quantization, stored_quantization
from utils.models.sources import Source, locate, parse_path
from utils.pairs.compatibility import Compatibility, compare_models, describe_without_model
from utils.pairs.pair import Pair, weight_notes
from utils.pairs.request import (
    EMBEDDED,
    HEAD,
    LAYERS,
    MODEL,
    MTP,
    PARD,
    PairRequest,
    check_request,
    check_shared,
    layer_count,
    with_defaults,
)
from utils.prompts.chat_template import end_ids, unknown_ids
from utils.text import first_of

QUANTIZED = "quantization_config"
# In the target's files, so not in the table. Programs feed the target's state before or after its final norm.
MTP_FORMAT = DrafterFormat("MTP", lambda checkpoint: False, load_mtp, lambda checkpoint: True)


def load_pair(request: PairRequest, report: Reporter) -> Pair:
    """Load the requested pair. `report` gets a line before each slow step.

    Raises UserError for invalid options, for models that are missing, gated, damaged, too large or not supported, and
    for a drafter that cannot draft for the target.
    """
    device = choose_device(request.device)
    resolved = with_defaults(request, device, choose_device(request.drafter_device or device))
    placement = _placement(request.device, device, resolved, report)
    # As requested, not as resolved: only `auto` may spread a model, but here it is already a device.
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
        # The request without its defaults is stored, so that /load can change a part of it and resolve the rest again.
        pair = _pair(request, resolved, target, drafter, identity=_identity(resolved, source, plan))
    return replace(pair, notes=(*pair.notes, *weight_notes(pair)))


def _placement(name: str, device: str, resolved: PairRequest, report: Reporter) -> Placement:
    """The placement of models. `name` is the requested device: only `auto` may spread a model over several devices."""
    dtype, weights = choose_dtype(resolved.dtype, device), resolved.engine_weights
    return Placement(device, dtype, report, may_spread=name == "auto", engine_weights=weights)


def _located(request: PairRequest, report: Reporter) -> Source:
    """The source of the target. For engines that compute in blocks, that is the GGUF file of the embedded target."""
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
    model = load_model(source, quantize, placement, drafts_with=plan.target_prefix)
    tokenizer = load_tokenizer(source)
    with explained_errors(source.name):
        end_ids(model, tokenizer)  # invalid end ids must be reported before a drafter is loaded, which is not to blame
        weights = _engine_weights(request.engine_weights, located, model)
    return LoadedTarget(source.name, model, tokenizer, quantize, weights)


def _engine_weights(kind: str, source: Source, model: PreTrainedModel) -> EngineWeights:
    """The weights for engines. `kind` is one of ENGINE_WEIGHTS. `source` is the original one, before a GGUF file is
    converted.
    """
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
    """The key of stored engine results: the files of the models, and how they are loaded."""
    files = [*model_files(source), *([] if plan.source is None else model_files(plan.source))]
    files += sorted(filter(Path.is_file, plan.head.iterdir())) if plan.head else []
    options = (request.drafter, request.dtype, request.quantize, request.drafter_quantize, request.device)
    return "\n".join([*map(file_state, files), *map(str, options)]) if files else ""


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A target, its tokenizer, its name and quantization for messages, and how engines compute its weights."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    quantize: str
    weights: EngineWeights


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter, or None, and messages for the user.

    `tokenizer` is its own if drafts must be translated. `blocks` are those of its GGUF file, if engines multiply with
    them.
    """

    model: PreTrainedModel | FeatureDrafter | None = None
    name: str | None = None
    kind: str | None = None
    notes: tuple[str, ...] = ()
    quantize: str | None = None
    compatibility: Compatibility | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    blocks: GgufBlocks | None = None


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """The source of a drafter: a head's folder, a source or, without both, layers of the target.

    `published` is the checkpoint of a drafter that reads the target's hidden states, and its format. It is None if the
    source is a model.
    """

    placement: Placement
    quantize: str
    head: Path | None
    source: Source | None
    layers: int | None
    published: tuple[DrafterCheckpoint, DrafterFormat] | None = None

    @property
    def target_prefix(self) -> str:
        """The prefix of tensors that the drafter reads from the target's own files. Empty without such tensors."""
        if self.published is None or self.source is not None:
            return ""
        names = [stored.split(".") for _, stored in self.published[0].files.values()]
        common = takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))
        return "".join(f"{parts[0]}." for parts in common)


def plan_drafter(request: PairRequest, placement: Placement, target: Source) -> DrafterPlan:
    """Find the drafter before the target is loaded. `target` is the target's source.

    Raises UserError if it does not exist or does not suit the request.
    """
    quantize, layers, source, published = str(request.drafter_quantize), layer_count(request.drafter), None, None
    head = None if request.drafter is None or request.drafter == MTP else _head_folder(request.drafter, request)
    if request.drafter == MTP:
        published = _own_layers(target)
    # A head is read from its folder and a cut shares the target's weights; neither is quantized.
    elif request.drafter is not None and head is None and layers is None:
        check_quantization(quantize, placement.device)
        source = locate(request.drafter, placement.report)
        published = _published(source)
    if head or published:
        kind = published[1].name if published else HEAD
        check_shared(request, f"A drafter of the kind {kind} has the number format and the device of the target")
    return DrafterPlan(placement, quantize, head, source, layers, published)


def load_drafter(plan: DrafterPlan, target: LoadedTarget) -> LoadedDrafter:
    """Load the planned drafter. Raises UserError if it cannot be loaded or cannot draft for the target."""
    if plan.head:
        _check_one_device(target, HEAD)
        return LoadedDrafter(load_head(plan.head, target.model), f"head of {target.name}", HEAD)
    if plan.published:
        return _load_published(*plan.published, target)
    if plan.source:
        return _load_model(plan.source, plan, target)
    return _cut_layers(target, plan.layers)


def _head_folder(drafter: str, request: PairRequest) -> Path | None:
    """The folder of a head, or None if the drafter is not a head."""
    folder = EMBEDDED_HEAD if drafter == HEAD else parse_path(drafter)
    if drafter == HEAD and request.target != "embedded":
        raise UserError(
            "'head' is the drafter of the embedded target: train one for this target with `python -m sampling.distill`."
        )
    if not is_head(folder):
        if drafter == HEAD:
            raise UserError(f"The embedded head is missing from {folder}: reinstall the program, or use layers:10.")
        return None
    return folder


def _published(source: Source) -> tuple[DrafterCheckpoint, DrafterFormat] | None:
    """The checkpoint of a drafter that reads hidden states, and its format. None if the source is a model."""
    checkpoint = read_checkpoint(source)
    with explained_errors(source.name):
        known = None if checkpoint is None else format_of(checkpoint)
    if checkpoint is None:
        return None
    if known is None:
        # transformers would read integers as weights if no config says how they were quantized.
        if not any(part.get(QUANTIZED) for part in (checkpoint.config, checkpoint.part("text_config"))):
            checkpoint.check_types()
        return None
    checkpoint.check_values()  # earlier than loading a target for nothing
    return checkpoint, known


def _own_layers(target: Source) -> tuple[DrafterCheckpoint, DrafterFormat]:
    """The MTP layers in the files of the target. Raises UserError if they are missing or not readable."""
    if target.gguf:
        raise UserError(
            f"MTP layers are not read from GGUF files such as '{target.name}': name the original checkpoint as "
            "--target, or use a different --drafter."
        )
    checkpoint = read_checkpoint(target)
    if checkpoint is None:
        raise no_layers(target.name, {})
    return mtp_layers(checkpoint), MTP_FORMAT


def _load_published(checkpoint: DrafterCheckpoint, known: DrafterFormat, target: LoadedTarget) -> LoadedDrafter:
    _check_one_device(target, known.name)
    if target.model.config.is_encoder_decoder:
        raise UserError(f"'{checkpoint.name}' drafts for decoder-only targets: use a different --drafter.")
    with explained_errors(checkpoint.name), quiet():
        drafter = known.load(checkpoint, target.model)
    drafter.name_or_path = checkpoint.name
    files = tuple(sorted({path for path, _ in checkpoint.files.values()}))
    drafter.origin = Origin(files, drafter.conventions, known.is_ambiguous(checkpoint))
    return LoadedDrafter(drafter, f"{checkpoint.name} ({known.name})", known.name)


def _check_one_device(target: LoadedTarget, kind: str) -> None:
    # Features of several depths would be on different devices.
    if is_spread(target.model):
        raise UserError(
            f"A drafter of the kind {kind} needs {target.name} on one device, and it is on several: use a different "
            "--drafter."
        )


def _load_model(source: Source, plan: DrafterPlan, target: LoadedTarget) -> LoadedDrafter:
    where, in_blocks = plan.placement, None
    if where.engine_weights == "gguf" and source.gguf and where.device == "cpu" and plan.quantize == "none":
        in_blocks = load_in_blocks(source, where)
    if isinstance(in_blocks, InBlocks):
        model, tokenizer = in_blocks.model, in_blocks.tokenizer
    else:
        source = convert_if_gguf(source, where)
        model, tokenizer = load_model(source, plan.quantize, where), optional_tokenizer(source)
    with explained_errors(source.name), quiet():
        compatibility = compare_models(target.model, target.tokenizer, model, tokenizer)
    compatibility.check(source.name, can_cut=not target.model.config.is_encoder_decoder)
    notes = remote_code_notes(model, source.name) + window_notes(model, source.name) + compatibility.notes()
    block = masked_block(model)
    notes += pard_notes(block, source.name, translated=compatibility.needs_translation)
    return LoadedDrafter(
        model,
        source.name,
        MODEL if block is None or compatibility.needs_translation else PARD,
        notes,
        stored_quantization(model.config) or plan.quantize,
        compatibility,
        # An equal tokenizer is dropped: None means that drafts need no translation.
        tokenizer if compatibility.needs_translation else None,
        in_blocks.blocks if isinstance(in_blocks, InBlocks) else None,
    )


def _cut_layers(target: LoadedTarget, layers: int | None) -> LoadedDrafter:
    """The first layers of the target with shared weights.

    Without a number a third of them, or None if the target cannot be cut.
    """
    depth = default_depth(target.model) if layers is None else layers
    if depth is None:
        return LoadedDrafter(notes=(f"no drafter: none was given, and {target.name} cannot be cut into layers",))
    try:
        model = first_layers(target.model, depth)
    except UserError as error:
        # Without --drafter the cut was not requested, so its failure is only worth a note.
        if layers is not None:
            raise
        return LoadedDrafter(notes=(f"no drafter: {error}",))
    first = first_of(depth, "layer")
    notes = () if layers else (f"no drafter was given: drafting with the {first} of {target.name}",)
    model.name_or_path = f"{target.name}, {first}"
    return LoadedDrafter(model, model.name_or_path, f"{LAYERS}{depth}", notes, target.quantize)
