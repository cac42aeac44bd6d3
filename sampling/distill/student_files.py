"""Students made new for a plan, read from a folder, and written to one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import CONFIG_NAME

from sampling.distill.conversion import converted_layers, eagle3_from_head
from sampling.distill.dataset import Corpus
from sampling.distill.options import Plan
from sampling.distill.students import HeadStudent, ModelStudent, Student, page_layers
from sampling.distill.target import Target
from utils.decode.features import layer_count
from utils.decode.model_info import context_length, vocabulary_size
from utils.drafter_formats.checkpoint import read_checkpoint
from utils.drafter_formats.eagle3 import Eagle3, load_eagle3
from utils.drafter_formats.eagle3_file import Surroundings, chosen_layers, new_eagle3, save_eagle3, usual_layers
from utils.drafter_formats.formats import format_of
from utils.drafter_formats.target_parts import DraftHead
from utils.engine.stored_weights import fill
from utils.errors import UserError
from utils.models.checkpoints import load_model
from utils.models.devices import Placement
from utils.models.draft_head import Head, feature_layers, shape_for
from utils.models.head_file import HeadFile, is_head, read_head, save_head
from utils.models.load_errors import quiet
from utils.models.sources import locate

TRAINING_ATTENTION = "sdpa"  # faster than row-invariant attention, which only drafting needs


def planned_layers(plan: Plan, target: Target) -> tuple[int, ...]:
    """The hidden states that pages of this plan hold. Raises UserError if the target does not have one of them."""
    count = layer_count(target.model)
    if plan.start:
        student = load_student(Path(plan.start), target)
        return page_layers(converted_layers(student.head, count)) if is_converted(student, plan) else student.layers
    if plan.kind == "eagle3":
        chosen = [int(number) for number in plan.layers.split(",")] if plan.layers else usual_layers(count)
        return page_layers(chosen_layers(chosen, count))
    return page_layers(feature_layers(count) if plan.kind == "head" else ())


def token_counts(corpus: Corpus, vocabulary: int) -> Tensor:
    """How often the target generated each token (V,)."""
    totals = torch.zeros(vocabulary, dtype=torch.long)
    for number in range(len(corpus)):
        page = corpus.page(number)
        totals += torch.bincount(page.tokens[page.generated].long(), minlength=vocabulary)
    return totals


def most_frequent_ids(corpus: Corpus, count: int, vocabulary: int) -> Tensor:
    """The `count` ids that the target generated most often, ascending (V',)."""
    totals = token_counts(corpus, vocabulary)
    return totals.argsort(descending=True, stable=True)[:count].sort().values


def create_student(target: Target, corpus: Corpus, plan: Plan) -> Student:
    """A new student, or the one in `plan.start`, converted if that is a head and the plan is for an EAGLE-3 drafter.

    The vocabulary of a head is always that of the corpus. An EAGLE-3 drafter keeps the one it has.
    """
    torch.manual_seed(plan.seed)
    student = load_student(Path(plan.start), target) if plan.start else None
    # Weights are frozen when they are loaded.
    if student is not None and student.kind != "head":
        student.weights.requires_grad_(True)
        return student
    if plan.kind == "lm":
        return ModelStudent(_small_model(target.model, plan).to(target.model.device))
    ids = most_frequent_ids(corpus, plan.vocabulary, vocabulary_size(target.model))
    if is_converted(student, plan):
        return _head_student(eagle3_from_head(student, target, corpus), target, ids)
    if isinstance(student, HeadStudent):
        return _head_student(student.head.requires_grad_(True), target, ids)
    if plan.kind == "eagle3":
        return _head_student(new_eagle3(target.model, planned_layers(plan, target)[:-1]), target, ids)
    return _head_student(_new_head(target.model), target, ids)


def is_converted(student: Student | None, plan: Plan) -> TypeGuard[HeadStudent]:
    """Whether this is a head that is to become an EAGLE-3 drafter."""
    return isinstance(student, HeadStudent) and student.kind == "head" and plan.kind == "eagle3"


def load_student(folder: Path, target: Target) -> HeadStudent | ModelStudent:
    """The drafter in a folder, in float32. Raises UserError if there is none or if it does not fit the target."""
    if is_head(folder):
        head, vocabulary = read_head(folder, target.model)
        return _head_student(head, target, vocabulary)
    if not (folder / CONFIG_NAME).is_file():
        raise UserError(f"{folder} contains no drafter: give a folder that this command has written.")
    source = locate(str(folder), lambda line: None)
    if checkpoint := read_checkpoint(source):
        known = format_of(checkpoint)
        if known and known.load is not load_eagle3:
            raise UserError(f"{folder} holds a drafter of the format {known.name}, which this command does not train.")
        if known:
            return _eagle3_student(load_eagle3(checkpoint, target.model), folder)
    placement = Placement(str(target.model.device), torch.float32, lambda line: None)
    model = load_model(source, "none", placement)
    fill([model])  # they are trained
    if (size := vocabulary_size(model)) != (expected := vocabulary_size(target.model)):
        raise UserError(f"The drafter in {folder} has a vocabulary of {size:,} ids and the target one of {expected:,}.")
    return ModelStudent(model)


def save_student(student: Student, folder: Path, target: Target, corpus: Corpus) -> None:
    """Write the drafter to a folder that `--drafter FOLDER` accepts. corpus: the text that it was trained on."""
    if isinstance(student, HeadStudent):
        if isinstance(student.head, Head):
            save_head(folder, HeadFile.of(student.head, student.ids, target.model))
            return
        counts = token_counts(corpus, vocabulary_size(target.model))
        around = Surroundings(student.embed.weight, student.rows, student.ids, counts)
        save_eagle3(folder, student.head, target.model, around)
    elif isinstance(student, ModelStudent):
        with quiet():
            student.model.save_pretrained(folder)
            target.tokenizer.save_pretrained(folder)


def _eagle3_student(drafter: Eagle3, folder: Path) -> HeadStudent:
    """A loaded drafter in float32. What it may share with its target stays as it is."""
    if any(cast(Any, layer).self_attn.sliding_window for layer in drafter.layers):
        raise UserError(f"The drafter in {folder} has layers with a sliding window, which this command does not train.")
    embed, output = drafter.embed_tokens, cast(DraftHead, drafter.lm_head)
    del drafter.embed_tokens, drafter.lm_head
    rows, ids = output.rows.weight, output.vocabulary
    every = torch.arange(len(rows), device=rows.device)
    drafter.config._attn_implementation = TRAINING_ATTENTION
    return HeadStudent(drafter.float(), embed, rows.detach(), every if ids is None else ids)


def _head_student(head: Head | Eagle3, target: Target, vocabulary: Tensor) -> HeadStudent:
    vocabulary = vocabulary.to(target.model.device)
    embed = target.model.get_input_embeddings()
    if isinstance(head, Eagle3):  # it is loaded with the weights alone, without the factor of some targets
        embed = nn.Embedding.from_pretrained(embed.weight.detach())
        head.config._attn_implementation = TRAINING_ATTENTION
    return HeadStudent(head.to(target.model.device), embed, target.lm_head[vocabulary], vocabulary)


@torch.no_grad()
def _new_head(model: Any) -> Head:
    """Small random weights that pass the last feature through: at first a head repeats the previous prediction."""
    head = Head(shape_for(model, feature_layers(layer_count(model))))
    size = head.shape.hidden
    for parameter in head.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    norm = getattr(model.get_decoder(), "norm", None)
    # The last feature comes after the target's final norm. Dividing by that norm's weight undoes the scaling, and the
    # head's own norm, which starts with the same weight, applies it again.
    scale = torch.ones(size) if norm is None or norm.weight.shape != (size,) else norm.weight.float().cpu()
    # Weights near 0 would give huge reciprocals.
    median = scale.abs().median().clamp(min=1e-3)
    scale = scale.where(scale.abs() > 0.05 * median, median)
    head.norm.weight.copy_(scale)
    head.read.weight[:, -size:] += torch.diag(1 / scale)
    # The second half of the input of `mix` is the state, the first half the embedding.
    head.mix.weight[:, -size:] += torch.eye(size)
    return head


def _small_model(target: Any, plan: Plan) -> Any:
    heads = max(1, plan.width // 64)
    config = LlamaConfig(
        vocab_size=vocabulary_size(target),
        hidden_size=plan.width,
        intermediate_size=4 * plan.width,
        num_hidden_layers=plan.depth,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context_length(target) or 1 << 15,
        tie_word_embeddings=True,
        bos_token_id=target.config.bos_token_id,
        eos_token_id=target.generation_config.eos_token_id,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)
