"""From the words of the command line to a target, its drafter and their tokenizer, ready to decode.

Whatever goes wrong on the way is a UserError of one sentence. Words are checked before anything slow happens. Which decoder uses what,
and warming up, is left to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from utils.engine import Engine
from utils.errors import UserError
from utils.models.checkpoints import Placement, code_notes, load_model, load_tokenizer
from utils.models.devices import choose_device, choose_dtype
from utils.models.embedded import Report
from utils.models.head_file import is_head, load_head
from utils.models.heads import Grafted
from utils.models.layer_cut import default_depth, first_layers
from utils.models.prompting import end_ids
from utils.models.quantization import check_kind
from utils.models.sources import Source, locate
from utils.token_rules import ignored_settings

LAYERS = "layers:"
HEAD = "head"  # the embedded target's own
EMBEDDED_HEAD = Path(__file__).parent / "embedded_head"


@dataclass(frozen=True, slots=True)
class PairRequest:
    """The words of the command line. No drafter means the target's own first layers, where it can be cut."""

    target: str
    drafter: str | None
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "none"
    drafter_quantize: str = "none"
    engine_weights: str = "float32"


@dataclass(frozen=True, slots=True)
class Pair:
    """What was loaded, and the engine that computes it. `drafter_kind` is "model", "layers:K", "head" or None; `notes` are for the user.

    quantize, drafter_quantize: how the weights of each are stored, a word of utils.bounds.QUANTIZATIONS.
    """

    target: PreTrainedModel
    drafter: PreTrainedModel | Grafted | None
    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]
    target_name: str
    drafter_name: str | None
    drafter_kind: str | None
    device: str
    dtype: str
    quantize: str
    drafter_quantize: str | None
    engine: Engine
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Drafter:
    """A drafter, or none, and what is said about it."""

    model: PreTrainedModel | Grafted | None = None
    name: str | None = None
    kind: str | None = None
    notes: tuple[str, ...] = ()
    quantize: str | None = None


def load_pair(request: PairRequest, report: Report) -> Pair:
    """Load what the request asks for; `report` hears a line before each slow step.

    Raises UserError for anything that cannot be had: a word that means nothing, a model that is missing, gated, damaged, too large or of
    the wrong kind, or a drafter that does not fit the target.
    """
    device = choose_device(request.device)
    where = Placement(device, choose_dtype(request.dtype, device), report)
    depth = _check_words(request)
    source = _locate(request.target, request.quantize, report)
    # Before the target is loaded: a wrong word should not cost a minute of waiting.
    head = _head_folder(request)
    cuts = request.drafter is None or depth is not None
    separate = None if cuts or head else _locate(str(request.drafter), request.drafter_quantize, report)
    target = load_model(source, request.quantize, where)
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise UserError(f"'{source.name}' has no tokenizer files: copy tokenizer.json and tokenizer_config.json next to the weights.")
    if head:
        drafter = _Drafter(load_head(head, target), f"head of {source.name}", HEAD)
    elif separate:
        model = load_model(separate, request.drafter_quantize, where)
        _check_fit(model, target, own=load_tokenizer(separate), tokenizer=tokenizer, name=separate.name)
        drafter = _Drafter(model, separate.name, "model", code_notes(model, separate.name), request.drafter_quantize)
    else:
        drafter = _cut_drafter(target, source.name, depth, request.quantize)
    return Pair(
        target=target,
        drafter=drafter.model,
        tokenizer=tokenizer,
        end_ids=end_ids(target, tokenizer),
        target_name=source.name,
        drafter_name=drafter.name,
        drafter_kind=drafter.kind,
        device=device,
        dtype=str(target.dtype).removeprefix("torch."),
        quantize=request.quantize,
        drafter_quantize=drafter.quantize,
        engine=_engine(target, drafter.model, bytewise=request.engine_weights == "int8"),
        notes=code_notes(target, source.name) + ignored_settings(target, source.name) + drafter.notes,
    )


def _engine(target: PreTrainedModel, drafter: PreTrainedModel | Grafted | None, *, bytewise: bool) -> Engine:
    if isinstance(drafter, Grafted):
        return Engine([target], helpers=[drafter], bytewise=bytewise)
    return Engine([target, *([drafter] if drafter else [])], bytewise=bytewise)


def _head_folder(request: PairRequest) -> Path | None:
    """Where the head is that the request asks for; None where it asks for something else."""
    word = request.drafter
    if word is None:
        return None
    folder = EMBEDDED_HEAD if word == HEAD else Path(word).expanduser()
    if word == HEAD and request.target != "embedded":
        raise UserError("'head' is the embedded target's own drafter: for another target make one with `python -m sampling.distill`.")
    if not is_head(folder):
        if word == HEAD:
            raise UserError(f"The embedded target's head is missing from {folder}: fetch the program again, or use --drafter layers:10.")
        return None
    if request.drafter_quantize != "none":
        raise UserError("A head is computed in the target's number format: leave --drafter-quantize out.")
    return folder


def _check_words(request: PairRequest) -> int | None:
    """The K of a `layers:K` drafter, or None."""
    if request.target.startswith(LAYERS):
        raise UserError(f"'{request.target}' is no target: layers:K can only be a --drafter.")
    cut = request.drafter is None or request.drafter.startswith(LAYERS)
    if cut and request.drafter_quantize != "none":
        raise UserError("A layers:K drafter shares the weights of the target: leave --drafter-quantize out and use --quantize.")
    if request.drafter is None or not cut:
        return None
    depth = request.drafter.removeprefix(LAYERS)
    # int() would also take signs, blanks, underscores and the digits of other scripts.
    if not (depth.isascii() and depth.isdigit()):
        raise UserError(f"'{request.drafter}' is no drafter: write layers:K with a whole number, for example layers:4.")
    return int(depth)


def _locate(word: str, kind: str, report: Report) -> Source:
    check_kind(kind, gguf=word.lower().endswith(".gguf"), name=word)
    return locate(word, report)


def _cut_drafter(target: PreTrainedModel, name: str, depth: int | None, quantize: str) -> _Drafter:
    """The first layers of the target, weights shared; without a depth a third of them, or no drafter where that cannot be."""
    chosen = default_depth(target) if depth is None else depth
    if chosen is None:
        return _Drafter(notes=(f"no drafter: none was given, and {name} cannot be cut into layers",))
    try:
        model = first_layers(target, chosen)
    except UserError as error:
        # Nobody asked for this cut, so its failure is only worth a note.
        if depth is not None:
            raise
        return _Drafter(notes=(f"no drafter: {error}",))
    notes = () if depth else (f"no drafter was given: drafting with the first {chosen} layers of {name}",)
    model.name_or_path = f"{name}, first {chosen} layers"
    return _Drafter(model, model.name_or_path, f"{LAYERS}{chosen}", notes, quantize)


def _check_fit(
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    *,
    own: PreTrainedTokenizerBase | None,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
) -> None:
    """Both models must read and write the same tokens; rows that only pad a vocabulary carry none and may differ."""
    # A folder without tokenizer files is taken to share the target's.
    reason = None
    if drafter.config.is_encoder_decoder != target.config.is_encoder_decoder:
        reason = "one of them is an encoder-decoder model and the other is not"
    elif own is not None and own.get_vocab() != tokenizer.get_vocab():
        reason = "its tokenizer is another one"
    elif drafter.get_input_embeddings().num_embeddings < min(len(tokenizer), target.get_input_embeddings().num_embeddings):
        reason = "its vocabulary is smaller"
    if reason:
        other = "" if target.config.is_encoder_decoder else ", or layers:K"
        raise UserError(f"'{name}' cannot draft for this target: {reason}; take a drafter of the same family{other}.")
