"""The target, and the drafters that are trained for it ("students"): made new for a plan, read from a folder, and
written to one.

A drafter in the EAGLE-3 format is unrolled over several drafts (arXiv 2503.01840): its prediction of step s
at entry t uses its own state of step s - 1 at t and the true token. A block drafter in the DSpark format (arXiv
2607.05147) predicts all drafts in one pass; only its Markov head reads the true tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.utils import CONFIG_NAME

from sampling.distill.blocks import block_states
from sampling.distill.options import TrainingPlan
from sampling.distill.pages import Corpus, TextPage
from utils.decode.features import layer_count
from utils.decode.model_info import vocabulary_size
from utils.drafter_formats.checkpoint import read_checkpoint
from utils.drafter_formats.dflash import DFlash, load_dflash
from utils.drafter_formats.dspark_file import can_be_trained, new_dspark, save_dspark
from utils.drafter_formats.eagle3 import Eagle3, load_eagle3
from utils.drafter_formats.eagle3_file import (
    Surroundings,
    can_be_stored,
    new_eagle3,
    save_eagle3,
    usual_layers,
)
from utils.drafter_formats.formats import format_of
from utils.drafter_formats.target_parts import DraftHead
from utils.engine.invariant import InvariantEngine
from utils.engine.layer_engine import install_with_fallback, unreported
from utils.engine.selftest import Reference
from utils.engine.weight_format import EngineWeights
from utils.errors import UserError
from utils.models import Reporter
from utils.models.checkpoints import load_model, load_tokenizer
from utils.models.memory import Placement, choose_device
from utils.models.sources import locate

UNROLLED = "unrolled"  # the name of the attention below, as transformers knows it
ALL = slice(None)
LAST = -1  # the hidden state after the final norm, which the target's output layer reads


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded target. lm_head: the weight (V, H) of its output layer."""

    model: Any
    tokenizer: Any
    lm_head: Tensor


def load_target(name: str, device_name: str, report: Reporter) -> Target:
    """Load a hub id, folder, GGUF file or `embedded`. Raises UserError if no drafter can be trained for it."""
    device = choose_device(device_name)
    placement = Placement(device, training_dtype(device), report)
    source = locate(name, report)
    model = load_model(source, "none", placement)
    return Target(model, load_tokenizer(source), output_weight(model))


def training_dtype(device: str) -> torch.dtype:
    """bfloat16 where the hardware has instructions for it, float32 elsewhere."""
    if device.startswith("cuda"):
        is_short = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_short = device == "cpu" and torch.cpu._is_amx_tile_supported()  # without matrix tiles bfloat16 is slow
    return torch.bfloat16 if is_short else torch.float32


@torch.no_grad()
def output_weight(model: Any) -> Tensor:
    """The weight (V, H) that maps the last hidden state to the logits. Raises UserError if there is none."""
    name, layer = model.name_or_path, model.get_output_embeddings()
    if model.config.is_encoder_decoder:
        raise UserError(f"{name} is an encoder-decoder model: drafters can be trained for decoder-only models only.")
    if getattr(model, "_is_stateful", False):
        raise UserError(f"{name} is a recurrent model: drafters can be trained for models with attention only.")
    weight: Tensor | None = getattr(layer, "weight", None)
    # Training computes the target's logits from stored features by this matrix alone.
    if weight is None or getattr(layer, "bias", None) is not None or weight.dim() != 2:
        raise UserError(f"The output layer of {name} is not a bias-free matrix: no drafter can be trained for it.")
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config(decoder=True).vocab_size
    output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    product = torch.nn.functional.linear(output.hidden_states[-1], weight).float()
    # The bound leaves room for the rounding of bfloat16.
    if (product - output.logits.float()).norm() > 0.05 * output.logits.float().norm():
        raise UserError(f"{name} caps or scales its logits after the output layer: no drafter can be trained for it.")
    return weight.detach()


def install_engine(model: Any) -> InvariantEngine | None:
    """Let machine code compute a target in float32 on a CPU: with few rows it takes a fraction of PyTorch's time.

    Returns the engine. None if it cannot compute the target, or has other logits.
    """
    weights = EngineWeights()
    engine = InvariantEngine([model], [], weights)
    if model.dtype != torch.float32 or engine.unsupported():
        return None
    try:
        fails = bool(install_with_fallback(engine, unreported, Reference.of(model, weights).difference))
    except Exception:  # the code of a model may raise anything, and PyTorch can compute the model instead
        fails = True
    if fails:
        engine.remove()
    return None if fails else engine


class Student:
    """A drafter in training, in the EAGLE-3 format.

    `embed` is its input embedding, and `rows` are its output rows (V', H) of the ids `vocabulary` (V',). Neither is
    trained. `layers` are the hidden states of its pages; the last one is the input of the target's output layer.
    `has_embedding` and `has_rows` are False if its files leave them to the target. A training step computes one of
    `stride` entries. Matrices whose names begin with one of `tables` are trained by AdamW, as vectors are.
    """

    kind, has_embedding, has_rows = "eagle3", True, True
    about = "in the EAGLE-3 format of the package speculators (arXiv 2503.01840, 2605.09992)"
    stride, tables = 1, tuple[str, ...]()
    head: Any

    def __init__(self, head: Eagle3 | DFlash, embed: Any, rows: Tensor, vocabulary: Tensor) -> None:
        self.head, self.embed, self.rows, self.vocabulary = head, embed, rows, vocabulary
        self.layers = page_layers(head.feature_layers)
        head.config._attn_implementation = UNROLLED

    @property
    def extra(self) -> Tensor:
        """More columns (V', R) of the output rows, which are trained."""
        return self.rows[:, :0]

    @property
    def confidence(self) -> nn.Linear | None:
        """Gives the logit of the acceptance from the states that give the logits."""
        return None

    def predictions(self, page: TextPage, steps: int, entries: slice = ALL) -> Iterator[Tensor]:
        """The states (B, N, H + R) of each step, whose logits are `states @ [rows, extra].T`, with N = T - steps - 1
        entries, or some of them. A student with a stride of 1 computes all.

        Entry 0 of step s predicts the token at position s + 2 of the page, entry 1 the next one, and so on.
        """
        # The same N for all steps, so that the last entry of the last step still has a token to predict.
        count = page.tokens.shape[1] - steps - 1
        tokens, head = page.tokens.long(), self.head
        read = len(head.feature_layers) * self.rows.shape[1]  # the pages may hold the last hidden state besides
        states = head.fuse_features(page.features[:, :count, :read].to(head.norm.weight.dtype))
        # Not the growing cache of the decoders, whose writes in place would break the backward pass.
        cache = DynamicCache(config=head.config)
        for step in range(steps):
            # Entry i of step s stands at position i + s, as it does when the head drafts.
            positions = torch.arange(step, step + count, device=tokens.device)[None]
            embedded = self.embed(tokens[:, step + 1 : step + 1 + count]).to(states.dtype)  # true tokens, not drafts
            states = head(states, embedded, positions, cache=cache)
            yield head.norm(states)
            states = head.feedback(states)


class BlockStudent(Student):
    """A drafter in the DSpark format, whose blocks have a slot for each draft.

    A training step computes the blocks at every second position, to save time.
    """

    kind, stride, tables = "block", 2, ("markov_head.", "confidence_head.")
    about = "with one pass per round, in the DSpark format of the package speculators (arXiv 2607.05147)"

    @property
    def extra(self) -> Tensor:
        return cast(Tensor, self.head.markov_head.markov_w2.weight)

    @property
    def confidence(self) -> nn.Linear:
        return cast(nn.Linear, self.head.confidence_head["proj"])

    def predictions(self, page: TextPage, steps: int, entries: slice = ALL) -> Iterator[Tensor]:
        count = page.tokens.shape[1] - steps - 1
        tokens, head, anchors = page.tokens.long(), self.head, range(1, count + 1)[entries]
        first = torch.tensor(anchors, device=tokens.device)
        slots = tokens.new_full((len(tokens), len(anchors), steps), head.mask_token)
        slots[..., 0] = tokens[:, first]
        read = len(head.feature_layers) * self.rows.shape[1]
        features = page.features[:, :count, :read].to(head.norm.weight.dtype)
        states = block_states(head, features, self.embed(slots).to(features.dtype), anchors)
        for step in range(steps):
            before = head.markov_head.markov_w1(tokens[:, first + step])  # true tokens, not drafts
            yield torch.cat([states[:, :, step], before.to(states.dtype)], dim=-1)


STUDENTS = {student.kind: student for student in (Student, BlockStudent)}


def new_head(target: Target, plan: TrainingPlan, *, drafted: int, mask: int) -> Any:
    """A new drafter with `drafted` output rows. mask: the token of unknown slots of a block."""
    layers = usual_layers(layer_count(target.model))
    if plan.kind == BlockStudent.kind:
        return new_dspark(target.model, layers, slots=plan.steps, drafted=drafted, mask=mask)
    return new_eagle3(target.model, layers)


def page_layers(read: tuple[int, ...]) -> tuple[int, ...]:
    """The hidden states that pages hold for a drafter that reads these: training compares with the last one."""
    return read if read[-1:] == (LAST,) else (*read, LAST)


def planned_layers(plan: TrainingPlan, target: Target) -> tuple[int, ...]:
    """The hidden states that pages of this plan hold."""
    if plan.start:
        student = load_student(Path(plan.start), target)
        if student.kind != plan.kind:
            raise UserError(f"{plan.start} holds a drafter of another kind: continue it with --kind {student.kind}.")
        return student.layers
    return page_layers(usual_layers(layer_count(target.model)))


def create_student(target: Target, corpus: Corpus, plan: TrainingPlan) -> Student:
    """A new student, or the one in `plan.start`.

    A new one drafts the most frequent tokens of the corpus, and an earlier one keeps its vocabulary.
    """
    torch.manual_seed(plan.seed)
    if plan.start:
        student = load_student(Path(plan.start), target)
        student.head.requires_grad_(True)  # weights are frozen when they are loaded
        if isinstance(student, BlockStudent):
            student.head.slots = plan.steps
        return student
    counts = token_counts(corpus, vocabulary_size(target.model))
    ids = counts.argsort(descending=True, stable=True)[: plan.vocabulary].sort().values.to(target.model.device)
    # Drafters are loaded with the weights alone, without the factor of some targets.
    embed = nn.Embedding.from_pretrained(target.model.get_input_embeddings().weight.detach())
    # The last one of the rarest tokens: those at the end are often padding.
    mask = len(counts) - 1 - int(counts.flip(0).argmin())
    head = new_head(target, plan, drafted=len(ids), mask=mask)
    return STUDENTS[plan.kind](head.to(target.model.device), embed, target.lm_head[ids], ids)


def token_counts(corpus: Corpus, vocabulary: int) -> Tensor:
    """How often the target generated each token (V,)."""
    totals = torch.zeros(vocabulary, dtype=torch.long)
    for number in range(len(corpus)):
        page = corpus.page(number)
        totals += torch.bincount(page.tokens[page.generated].long(), minlength=vocabulary)
    return totals


def load_student(folder: Path, target: Target) -> Student:
    """The drafter in a folder, in float32. Raises UserError if there is none or if it does not fit the target."""
    if not (folder / CONFIG_NAME).is_file():
        raise UserError(f"{folder} contains no drafter: give a folder that this command has written.")
    checkpoint = read_checkpoint(locate(str(folder), lambda line: None))
    known = format_of(checkpoint) if checkpoint else None
    if not checkpoint or not known:
        raise UserError(f"{folder} holds a model or an unknown format, which this command does not train.")
    drafter: Any = known.load(checkpoint, target.model) if known.load in (load_eagle3, load_dflash) else None
    if drafter is None or (isinstance(drafter, DFlash) and not can_be_trained(drafter)):
        raise UserError(f"{folder} holds a drafter of the format {known.name}, which this command does not train.")
    if isinstance(drafter, Eagle3) and not can_be_stored(drafter):
        raise UserError(f"The drafter in {folder} has layers with a window of one position, which are not trained.")
    # What it may share with its target stays as it is.
    embed, output = drafter.embed_tokens, cast(DraftHead, drafter.lm_head)
    del drafter.embed_tokens, drafter.lm_head
    rows, ids = output.rows.weight, output.vocabulary
    ids = torch.arange(len(rows), device=rows.device) if ids is None else ids
    kind = Student if isinstance(drafter, Eagle3) else BlockStudent
    student = kind(drafter.float(), embed, rows.detach(), ids)
    student.has_embedding, student.has_rows = (checkpoint.has(f"{part}.weight") for part in ("embed_tokens", "lm_head"))
    return student


def save_student(student: Student, folder: Path, target: Target) -> None:
    """Write the drafter to a folder that `--drafter FOLDER` accepts."""
    embedding = student.embed.weight if student.has_embedding else None
    around = Surroundings(embedding, student.rows if student.has_rows else None, student.vocabulary)
    save = save_dspark if isinstance(student, BlockStudent) else save_eagle3
    save(folder, student.head, target.model, around)


def unrolled_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """Attend with N entries of step s, (B, H, N, D), to keys and values of steps 0 to s, (B, G, (s + 1) N, D), with or
    without a sliding window. The cost grows with the window and not with the length of the text.

    An entry attends to the entries of step 0 up to its own place, and to its own entries of later steps. Returns
    (B, N, H, D).
    """
    heads, count, size = query.shape[1:]
    groups, later = key.shape[1], key.shape[2] // count - 1
    window = sliding_window or count + later
    width = min(window, count)
    blocks = -(-count // width)

    def cut(states: Tensor) -> Tensor:
        """(..., blocks, width, D) of (..., N, D)."""
        padded: Tensor = pad(states, (0, 0, 0, blocks * width - count))
        return padded.reshape(*padded.shape[:-2], blocks, width, size)

    def in_reach(states: Tensor) -> Tensor:
        """(B, G, 1, blocks, K, D): the entries of step 0 in a block and in the one before it, if there are several."""
        own = cut(states[:, :, None, :count])
        return own if blocks == 1 else torch.cat([pad(own, (0, 0, 0, 0, 1, 0))[..., :-1, :, :], own], dim=-2)

    query = query * (scaling or size**-0.5)
    rows = cut(query.unflatten(1, (groups, heads // groups)))  # (B, G, H/G, blocks, width, D)
    keys, values = in_reach(key), in_reach(value)
    allowed = _allowed(blocks, width, window - later, query.device)
    scores = [(rows @ keys.transpose(-1, -2)).masked_fill(~allowed, float("-inf"))]
    steps = [slice(count * step, count * (step + 1)) for step in range(1 + max(0, later - window), 1 + later)]
    scores += [(rows * cut(key[:, :, None, step])).sum(-1, keepdim=True) for step in steps]
    first, *own = torch.cat(scores, dim=-1).softmax(-1).split([keys.shape[-2], *[1] * len(steps)], dim=-1)
    result = first @ values
    for probs, step in zip(own, steps, strict=True):
        result = result + probs * cut(value[:, :, None, step])
    return result.flatten(1, 2).flatten(2, 3)[:, :, :count].transpose(1, 2), None


def _allowed(blocks: int, width: int, reach: int, device: torch.device) -> Tensor:
    """(blocks, width, K): which entries of step 0 the rows attend to: the `reach` last ones, their own included."""
    count = width if blocks == 1 else 2 * width
    column = torch.arange(count, device=device)
    distance = column[-width:, None] - column
    exists = (column >= count - width) | (torch.arange(blocks, device=device)[:, None, None] > 0)
    return exists & (distance >= 0) & (distance < reach)


AttentionInterface.register(UNROLLED, unrolled_attention)
AttentionMaskInterface.register(UNROLLED, lambda *_, **__: None)
