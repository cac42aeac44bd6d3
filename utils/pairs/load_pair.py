"""From a request to a target, its drafter and their tokenizer, ready to decode.

The drafter reads the target's hidden states, or is a separate model, the first layers of the target, or none.

Options are checked before anything slow happens, and every failure is a UserError of one sentence. Decoding and warming
up are left to the caller.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sampling.drafters.feature_sessions import feature_session
from sampling.drafters.masked import masked_block, pard_notes
from utils.decode.generation_rules import ignored_settings
from utils.decode.layer_cut import default_depth, first_layers
from utils.decode.model_info import is_spread
from utils.decode.sliding_window import window_notes
from utils.drafter_formats.checkpoint import DrafterCheckpoint, read_checkpoint
from utils.drafter_formats.formats import DrafterFormat, format_of
from utils.drafter_formats.mtp import load_mtp, mtp_layers
from utils.engine import Engine
from utils.engine.weight_format import EngineWeights
from utils.errors import UserError
from utils.files import file_state
from utils.models import Reporter
from utils.models.checkpoints import load_model, load_tokenizer, optional_tokenizer, remote_code_notes
from utils.models.embedded import EMBEDDED_HEAD, MODEL_NAME, embedded_gguf
from utils.models.feature_drafter import FeatureDrafter
from utils.models.file_model import model_files
from utils.models.gguf_model import GgufBlocks, load_in_blocks, shared_reader
from utils.models.load_errors import explained_errors, quiet
from utils.models.memory import Placement, choose_device, choose_dtype
from utils.models.quantization import check_quantization, stored_quantization
from utils.models.sources import Source, locate
from utils.pairs.pair import Compatibility, Pair, compare_models, describe_without_model, weight_notes
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
)
from utils.prompts.conversation import end_ids, unknown_ids
from utils.text import first_of

MTP_FORMAT = DrafterFormat("MTP", lambda checkpoint: False, load_mtp)  # in the target's files, so not in the table
SHARED = "A drafter of the kind {} has the number format of the target"


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

    `tokenizer` is its own if drafts must be translated.
    """

    model: PreTrainedModel | FeatureDrafter | None = None
    name: str | None = None
    kind: str | None = None
    notes: tuple[str, ...] = ()
    quantize: str | None = None
    compatibility: Compatibility | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    blocks: GgufBlocks | None = None


def load_pair(request: PairRequest, report: Reporter) -> Pair:
    """Load the requested pair. `report` gets a line before each slow step.

    Raises UserError for invalid options, for models that are missing, gated, damaged, too large or not supported, and
    for a drafter that cannot draft for the target.
    """
    device = choose_device(request.device)
    resolved = replace(request, device=device)
    check_request(resolved)
    check_quantization(request.quantize, device)
    dtype, may_spread = choose_dtype(request.dtype, device), request.device == "auto"
    where = Placement(device, dtype, report, may_spread, request.engine_weights)
    source = _located(resolved, report)
    # Before the target is loaded, so that mistakes are reported early.
    load_drafter, files = plan_drafter(resolved, where, source)
    target = _load_target(source, resolved, where)
    drafter = load_drafter(target)
    with explained_errors(target.name), quiet():
        identity = _identity(resolved, [*model_files(source), *files])
        # The request without its defaults is stored, so that /load can change a part of it and resolve the rest again.
        pair = _pair(request, resolved, target, drafter, identity=identity)
    return replace(pair, notes=(*pair.notes, *weight_notes(pair)))


def with_drafter(pair: Pair, folder: Path) -> Pair:
    """The pair with the drafter in a folder, a trained copy of its own, which keeps its kind and so its costs.

    The engine computes both. Raises UserError if the folder does not hold a drafter of this target.
    """
    if (published := _published(locate(str(folder), pair.engine.report))) is None:
        raise UserError(f"'{folder}' holds no drafter.")
    target = LoadedTarget(pair.target_name, pair.target, pair.tokenizer, pair.quantize, EngineWeights())
    loaded = _load_published(*published, target, kind=published[1].name)
    assert isinstance(loaded.model, FeatureDrafter)
    pair.engine.add_helper(loaded.model)
    request = replace(pair.request, drafter=str(folder))
    return replace(pair, drafter=loaded.model, drafter_name=loaded.name, request=request)


def _located(request: PairRequest, report: Reporter) -> Source:
    """The source of the target. For engines that compute in blocks, that is the GGUF file of the embedded target."""
    if request.engine_weights == "gguf" and request.target == EMBEDDED:
        path = embedded_gguf(report)
        return Source(str(path.parent), MODEL_NAME, path.name)
    return locate(request.target, report)


def _load_target(source: Source, request: PairRequest, where: Placement) -> LoadedTarget:
    model, read, blocks = _read(source, request.quantize, where, reads_rest=request.drafter == MTP)
    tokenizer = load_tokenizer(source) if read is None else read  # says that there is none
    with explained_errors(source.name):
        end_ids(model, tokenizer)  # invalid end ids must be reported before a drafter is loaded, which is not to blame
        weights = EngineWeights(request.engine_weights)
        if weights.format == "gguf":
            # Without blocks no engine has a forward pass of its own, but some multiply with them.
            weights = EngineWeights("gguf", blocks or GgufBlocks(Path(source.location, str(source.gguf)), model))
            if not weights.blocks:
                raise UserError(
                    f"--engine-weights gguf needs blocks such as Q4_0 or Q4_K, and '{source.name}' has none: use "
                    "--engine-weights int4 or int8."
                )
    return LoadedTarget(source.name, model, tokenizer, stored_quantization(model.config) or request.quantize, weights)


def _read(
    source: Source, quantize: str, where: Placement, *, reads_rest: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None, GgufBlocks | None]:
    """A model, its tokenizer if it has one, and the blocks of its GGUF file if engines compute it in these."""
    if source.gguf and quantize == "none" and (where.device, where.dtype) == ("cpu", torch.float32):
        loaded = load_in_blocks(source, where)
        if not isinstance(loaded, str):
            model, tokenizer, blocks = loaded
            return model, tokenizer, blocks if where.engine_weights == "gguf" else None
        where.report(f"{source.name} is unpacked to float32 when it is loaded: {loaded}")
    with shared_reader(Path(source.location, source.gguf)) if source.gguf else nullcontext():
        return load_model(source, quantize, where, reads_rest=reads_rest), optional_tokenizer(source), None


def _pair(
    request: PairRequest, resolved: PairRequest, target: LoadedTarget, drafter: LoadedDrafter, *, identity: str
) -> Pair:
    model, tokenizer, name = target.model, target.tokenizer, target.name
    notes = remote_code_notes(model, name) + ignored_settings(model, name) + window_notes(model, name)
    reads_states = isinstance(drafter.model, FeatureDrafter)
    return Pair(
        target=model,
        drafter=drafter.model,
        tokenizer=tokenizer,
        end_ids=end_ids(model, tokenizer),
        target_name=name,
        drafter_name=drafter.name,
        drafter_kind=drafter.kind,
        device=_device_of(model, resolved.device),
        dtype=str(model.dtype).removeprefix("torch."),
        quantize=target.quantize,
        drafter_quantize=drafter.quantize,
        drafter_dtype=None if drafter.model is None else str(drafter.model.dtype).removeprefix("torch."),
        engine=_engine(model, drafter, target.weights, identity),
        notes=notes + unknown_ids(model, tokenizer, name) + drafter.notes,
        request=request,
        drafter_tokenizer=drafter.tokenizer,
        compatibility=drafter.compatibility
        or describe_without_model(model, tokenizer, drafter.name, reads_states=reads_states),
    )


def _device_of(model: PreTrainedModel, device: str) -> str:
    """The device, or all devices on which accelerate keeps layers."""
    if not is_spread(model):
        return device
    layers: dict[str, int | str] = model.hf_device_map  # set by accelerate
    devices = (f"cuda:{entry}" if isinstance(entry, int) else str(entry) for entry in layers.values())
    return " + ".join(dict.fromkeys(devices))


def _engine(target: PreTrainedModel, drafter: LoadedDrafter, weights: EngineWeights, identity: str) -> Engine:
    weights = replace(weights, drafter_blocks=drafter.blocks)
    if isinstance(drafter.model, FeatureDrafter):
        return Engine([target], helpers=[drafter.model], weights=weights, identity=identity)
    return Engine([target, *([drafter.model] if drafter.model else [])], weights=weights, identity=identity)


def _identity(request: PairRequest, files: Sequence[Path]) -> str:
    """The key of stored engine results: the files of the models, and how they are loaded. Empty if they are unknown."""
    options = (request.drafter, request.dtype, request.quantize, request.drafter_quantize, request.device)
    return "\n".join([*map(file_state, files), *map(str, options)]) if files else ""


def plan_drafter(
    request: PairRequest, where: Placement, target: Source
) -> tuple[Callable[[LoadedTarget], LoadedDrafter], Sequence[Path]]:
    """Find the drafter before the target is loaded. `target` is the target's source.

    Returns how it is loaded once the target is there, and its files besides the target's. Raises UserError if it does
    not exist or does not suit the request.
    """
    drafter, layers = request.drafter, layer_count(request.drafter)
    if drafter is None or layers:
        return partial(_cut_layers, layers), ()
    if drafter == MTP:
        checkpoint = _own_layers(target)
        check_shared(request, SHARED.format(MTP_FORMAT.name))
        return partial(_load_published, checkpoint, MTP_FORMAT, kind=MTP_FORMAT.name), ()
    check_quantization(request.drafter_quantize, where.device)
    if drafter == HEAD and request.target != EMBEDDED:
        raise UserError(
            "'head' is the drafter of the embedded target: train one for this target with `python -m sampling.distill`."
        )
    source = Source(str(EMBEDDED_HEAD), HEAD) if drafter == HEAD else locate(drafter, where.report)
    if published := _published(source):
        check_shared(request, SHARED.format(published[1].name))
        kind = HEAD if drafter == HEAD else published[1].name
        return partial(_load_published, *published, kind=kind), model_files(source)
    return partial(_load_model, source, request.drafter_quantize, where), model_files(source)


def _published(source: Source) -> tuple[DrafterCheckpoint, DrafterFormat] | None:
    """The checkpoint of a drafter that reads hidden states, and its format. None if the source is a model."""
    if (checkpoint := read_checkpoint(source)) is None:
        return None
    with explained_errors(source.name):
        known = format_of(checkpoint)
    text = checkpoint.config.get("text_config") or {}
    # transformers would read integers as weights if no config says how they were quantized.
    if known is not None or not any(part.get("quantization_config") for part in (checkpoint.config, text)):
        checkpoint.check_types()
    return None if known is None else (checkpoint, known)


def _own_layers(target: Source) -> DrafterCheckpoint:
    """The MTP layers in the files of the target. Raises UserError if they are missing or not readable."""
    if (checkpoint := read_checkpoint(target)) is None:
        raise UserError(
            f"MTP layers are not read from GGUF files and the like, such as '{target.name}': name the original "
            "checkpoint as --target, or use a different --drafter."
        )
    with explained_errors(target.name):
        return mtp_layers(checkpoint)


def _load_published(
    checkpoint: DrafterCheckpoint, known: DrafterFormat, target: LoadedTarget, *, kind: str
) -> LoadedDrafter:
    if is_spread(target.model):  # features of several depths would be on different devices
        raise UserError(
            f"A drafter of the kind {known.name} needs {target.name} on one device, and it is on several: use a "
            "different --drafter."
        )
    if target.model.config.is_encoder_decoder:
        raise UserError(f"'{checkpoint.name}' drafts for decoder-only targets: use a different --drafter.")
    with explained_errors(checkpoint.name), quiet():
        drafter = known.load(replace(checkpoint, dtype=target.model.dtype), target.model)
        _draft_once(drafter, target.model)
    drafter.name_or_path = checkpoint.name
    name = f"head of {target.name}" if kind == HEAD else f"{checkpoint.name} ({known.name})"
    return LoadedDrafter(drafter, name, kind)


def _draft_once(drafter: FeatureDrafter, target: PreTrainedModel) -> None:
    """Draft one token, so that a config that does not fit the tensors is reported when the drafter is loaded."""
    size = len(drafter.feature_layers) * target.config.get_text_config(decoder=True).hidden_size
    session, context = feature_session(drafter), [0, 0]
    session.begin(context)
    session.add_features(torch.zeros(1, size, device=drafter.device, dtype=drafter.dtype), 0, 1)
    session.feed(context, keep=1)


def _load_model(source: Source, quantize: str, where: Placement, target: LoadedTarget) -> LoadedDrafter:
    model, tokenizer, blocks = _read(source, quantize, where)
    with explained_errors(source.name), quiet():
        found = compare_models(target.model, target.tokenizer, model, tokenizer)
    notes = remote_code_notes(model, source.name) + window_notes(model, source.name) + found.notes()
    block = masked_block(model)
    notes += pard_notes(block, source.name, translated=found.needs_translation)
    kind = MODEL if block is None or found.needs_translation else PARD
    quantized = stored_quantization(model.config) or quantize
    # An equal tokenizer is dropped: None means that drafts need no translation.
    translated = tokenizer if found.needs_translation else None
    return LoadedDrafter(model, source.name, kind, notes, quantized, found, translated, blocks)


def _cut_layers(layers: int | None, target: LoadedTarget) -> LoadedDrafter:
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
