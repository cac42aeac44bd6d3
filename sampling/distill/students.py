"""Students of either kind: how they begin, and how they are kept when they are done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from sampling.distill.dataset import Corpus
from sampling.distill.loss import HeadStudent, ModelStudent, Student
from sampling.distill.options import Plan
from utils.decode.model_session import context_length, vocabulary_size
from utils.errors import UserError
from utils.models.checkpoints import load_model
from utils.models.devices import Placement
from utils.models.draft_head import Head, feature_layers, shape_for
from utils.models.head_file import CONFIG, HeadFile, is_head, read_head, save_head
from utils.models.load_errors import quiet
from utils.models.sources import locate


def target_layers(target: Any) -> tuple[int, ...]:
    """The hidden states that a head of this target reads."""
    return feature_layers(target.config.get_text_config(decoder=True).num_hidden_layers)


def frequent(corpus: Corpus, count: int, vocabulary: int) -> Tensor:
    """The ids (V',), ascending, that the target chose most often."""
    totals = torch.zeros(vocabulary, dtype=torch.long)
    for number in range(len(corpus)):
        page = corpus.page(number)
        totals += torch.bincount(page.tokens[page.own].long(), minlength=vocabulary)
    return totals.argsort(descending=True, stable=True)[:count].sort().values


def begin(target: Any, corpus: Corpus, plan: Plan) -> Student:
    """A student that has learnt nothing yet, or what `plan.start` holds; a head's vocabulary is that of the corpus in either case."""
    torch.manual_seed(plan.seed)
    if plan.start:
        student = finished(Path(plan.start), target)
        student.weights.requires_grad_(True)
        if isinstance(student, ModelStudent):
            return student
        return head_student(student.head, target, frequent(corpus, plan.vocabulary, vocabulary_size(target)))
    if plan.kind == "lm":
        return ModelStudent(_small_model(target, plan).to(target.device))
    head = Head(shape_for(target, target_layers(target)))
    last_norm = target.get_decoder().norm.weight if hasattr(target.get_decoder(), "norm") else None
    _initialize(head, last_norm)
    return head_student(head.to(target.device), target, frequent(corpus, plan.vocabulary, vocabulary_size(target)))


def finished(folder: Path, target: Any) -> HeadStudent | ModelStudent:
    """The drafter in a folder, in float32. Raises UserError where there is none, or a head of another target."""
    if is_head(folder):
        head, vocabulary = read_head(folder, target)
        return head_student(head.to(target.device), target, vocabulary)
    model = load_model(
        locate(str(folder), lambda line: None), "none", Placement(str(target.device), torch.float32, lambda line: None)
    )
    if vocabulary_size(model) != vocabulary_size(target):
        raise UserError(
            f"The drafter in {folder} has another vocabulary than the target: {vocabulary_size(model):,} ids."
        )
    return ModelStudent(model)


def head_student(head: Head, target: Any, vocabulary: Tensor) -> HeadStudent:
    """A head with what it borrows."""
    vocabulary = vocabulary.to(target.device)
    return HeadStudent(
        head, target.get_input_embeddings(), target.get_output_embeddings().weight.detach()[vocabulary], vocabulary
    )


@torch.no_grad()
def _initialize(head: Head, last_norm: Tensor | None) -> None:
    """Small numbers, and the last feature straight through: the head begins by saying what the target said one token ago."""
    size = head.shape.hidden
    for part in head.parameters():
        if part.dim() == 2:
            nn.init.normal_(part, std=0.02)
    scale = torch.ones(size) if last_norm is None or last_norm.shape != (size,) else last_norm.float().cpu()
    usual = scale.abs().median().clamp(min=1e-3)
    scale = scale.where(scale.abs() > 0.05 * usual, usual)
    head.norm.weight.copy_(scale)
    head.read.weight[:, -size:] += torch.diag(1 / scale)
    head.mix.weight[:, -size:] += torch.eye(size)


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


def keep(student: Student, folder: Path, target: Any, tokenizer: Any) -> None:
    """Write a drafter that `--drafter FOLDER` takes."""
    if isinstance(student, HeadStudent):
        save_head(folder, HeadFile.of(student.head, student.ids, target))
    elif isinstance(student, ModelStudent):
        (folder / CONFIG).unlink(missing_ok=True)  # no head any more
        with quiet():
            student.model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
