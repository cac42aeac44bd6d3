"""The drafter of a pair: a head, a model of its own, the target's first layers, or none; and what is to be said about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from utils.decode.layer_cut import default_depth, first_layers
from utils.decode.model_session import is_spread
from utils.errors import UserError
from utils.models.checkpoints import code_notes, load_model, load_tokenizer
from utils.models.devices import Placement
from utils.models.draft_head import Grafted
from utils.models.gguf import converted
from utils.models.head_file import is_head, load_head
from utils.models.load_errors import explained, quiet
from utils.models.quantization import stored_kind
from utils.models.sources import Source, path_of
from utils.pairs.compatibility import Fit, check_fit, fit_of
from utils.pairs.request import HEAD, LAYERS, PairRequest

EMBEDDED_HEAD = Path(__file__).parent / "embedded_head"


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter, or none, and what is said about it."""

    model: PreTrainedModel | Grafted | None = None
    name: str | None = None
    kind: str | None = None
    notes: tuple[str, ...] = ()
    quantize: str | None = None
    fit: Fit | None = None
    tokenizer: PreTrainedTokenizerBase | None = None  # its own, where that is another


def head_folder(request: PairRequest) -> Path | None:
    """Where the head is that the request asks for; None where it asks for something else."""
    word = request.drafter
    if word is None:
        return None
    folder = EMBEDDED_HEAD if word == HEAD else path_of(word)
    if word == HEAD and request.target != "embedded":
        raise UserError(
            "'head' is the embedded target's own drafter: for another target make one with `python -m sampling.distill`."
        )
    if not is_head(folder):
        if word == HEAD:
            raise UserError(
                f"The embedded target's head is missing from {folder}: fetch the program again, or use --drafter layers:10."
            )
        return None
    if request.drafter_quantize != "none":
        raise UserError("A head is computed in the target's number format: leave --drafter-quantize out.")
    if request.drafter_device != request.device:
        raise UserError("A head reads the target's hidden states where they are: leave --drafter-device out.")
    return folder


def head_of(folder: Path, target: PreTrainedModel, name: str) -> LoadedDrafter:
    """The head in a folder. Raises UserError for that of another target, or one that is not in one place."""
    if is_spread(target):
        raise UserError(f"A head reads {name}'s hidden states, which are on several devices: give another --drafter.")
    return LoadedDrafter(load_head(folder, target), f"head of {name}", HEAD)


def separate_drafter(
    source: Source, quantize: str, where: Placement, target: PreTrainedModel, *, tokenizer: PreTrainedTokenizerBase
) -> LoadedDrafter:
    """A model of its own. Raises UserError where it cannot be loaded, or can be of no use to the target."""
    source = converted(source, where)
    model, own = load_model(source, quantize, where), load_tokenizer(source)
    with explained(source.name), quiet():
        fit = fit_of(target, tokenizer, model, own)
    check_fit(fit, source.name, cuttable=not target.config.is_encoder_decoder)
    notes = code_notes(model, source.name) + fit.notes()
    return LoadedDrafter(
        model, source.name, "model", notes, stored_kind(model.config) or quantize, fit, own if fit.translated else None
    )


def cut_drafter(target: PreTrainedModel, name: str, depth: int | None, quantize: str) -> LoadedDrafter:
    """The first layers of the target, weights shared; without a depth a third of them, or no drafter where that cannot be."""
    chosen = default_depth(target) if depth is None else depth
    if chosen is None:
        return LoadedDrafter(notes=(f"no drafter: none was given, and {name} cannot be cut into layers",))
    try:
        model = first_layers(target, chosen)
    except UserError as error:
        # Nobody asked for this cut, so its failure is only worth a note.
        if depth is not None:
            raise
        return LoadedDrafter(notes=(f"no drafter: {error}",))
    notes = () if depth else (f"no drafter was given: drafting with the first {chosen} layers of {name}",)
    model.name_or_path = f"{name}, first {chosen} layers"
    return LoadedDrafter(model, model.name_or_path, f"{LAYERS}{chosen}", notes, quantize)
