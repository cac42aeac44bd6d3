"""The drafters that are trained ("students"): what they predict on a page, and how they are created, loaded and saved.

A head is unrolled over several drafts (EAGLE-3, arXiv 2503.01840): its prediction of step s at entry t uses its own
state of step s - 1 at t and the true token. A small language model needs no unrolling, because it reads the target's
text as long as its drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import CONFIG_NAME

from sampling.distill.dataset import Corpus
from sampling.distill.generate import Page
from sampling.distill.options import Plan
from sampling.distill.target import Target
from utils.decode.model_info import context_length, vocabulary_size
from utils.errors import UserError
from utils.models.checkpoints import load_model
from utils.models.devices import Placement
from utils.models.draft_head import Head, feature_layers, shape_for
from utils.models.head_file import HeadFile, is_head, read_head, save_head
from utils.models.load_errors import quiet
from utils.models.sources import locate


@dataclass(frozen=True, slots=True)
class Predictions:
    """The predictions of one step, as the logits `states @ rows.T` of states (B, N, H) and output rows (V', H).

    position: entry 0 predicts the token at this position of the page, entry 1 the next one, and so on.
    """

    states: Tensor
    rows: Tensor
    position: int


class Student(Protocol):
    """A drafter in training. weights: the trained module. vocabulary: the ids (V',) it can draft, None for all."""

    weights: nn.Module
    vocabulary: Tensor | None

    def predictions(self, page: Page, steps: int) -> Iterator[Predictions]: ...


class HeadStudent:
    """A head in training. embed: the target's embedding. rows: the target's output rows (V', H) of `vocabulary`."""

    def __init__(self, head: Head, embed: Any, rows: Tensor, vocabulary: Tensor) -> None:
        self.head, self.ids = head, vocabulary
        self.weights: nn.Module = head
        self.vocabulary: Tensor | None = vocabulary
        self._embed, self._rows = embed, rows

    def predictions(self, page: Page, steps: int) -> Iterator[Predictions]:
        """The predictions of each step, with N = T - steps - 1 entries."""
        # The same N for all steps, so that the last entry of the last step still has a token to predict.
        count = page.tokens.shape[1] - steps - 1
        tokens, head = page.tokens.long(), self.head
        states = head.fuse_features(page.features[:, :count].to(head.mix.weight.dtype))
        # Not the growing cache of the decoders, whose writes in place would break the backward pass.
        cache = DynamicCache(config=head.config)
        for step in range(steps):
            # Entry i of step s stands at position i + s, as it does when the head drafts.
            positions = torch.arange(step, step + count, device=tokens.device)[None]
            embedded = self._embed(tokens[:, step + 1 : step + 1 + count]).to(states.dtype)  # true tokens, not drafts
            states = head(states, embedded, positions, cache=cache, mask=_attention_mask(count, step, tokens.device))
            yield Predictions(head.norm(states), self._rows, step + 2)


class ModelStudent:
    """A small causal language model in training, with the target's vocabulary."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.weights: nn.Module = model
        self.vocabulary: Tensor | None = None

    def predictions(self, page: Page, steps: int) -> Iterator[Predictions]:
        """The predictions of each step; one forward pass serves them all."""
        states = self.model.get_decoder()(input_ids=page.tokens.long()).last_hidden_state
        count = page.tokens.shape[1] - steps - 1
        rows = self.model.get_output_embeddings().weight
        for step in range(steps):
            # The state at position p predicts token p + 1, so entry 0 of this slice predicts token step + 2.
            yield Predictions(states[:, step + 1 : step + 1 + count], rows, step + 2)


def _attention_mask(count: int, step: int, device: torch.device) -> Tensor:
    """(1, 1, N, (step + 1) N): an entry attends to true entries up to itself and to its own earlier steps."""
    # (N, N) each. Keys lie in the cache step after step.
    true_entries = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    own_steps = torch.eye(count, dtype=torch.bool, device=device)
    return torch.cat([true_entries, *[own_steps] * step], dim=-1)[None, None]


def target_layers(model: Any) -> tuple[int, ...]:
    """The hidden states that a head of this target reads."""
    return feature_layers(model.config.get_text_config(decoder=True).num_hidden_layers)


def most_frequent_ids(corpus: Corpus, count: int, vocabulary: int) -> Tensor:
    """The `count` ids that the target generated most often, ascending (V',)."""
    totals = torch.zeros(vocabulary, dtype=torch.long)
    for number in range(len(corpus)):
        page = corpus.page(number)
        totals += torch.bincount(page.tokens[page.generated].long(), minlength=vocabulary)
    return totals.argsort(descending=True, stable=True)[:count].sort().values


def create_student(target: Target, corpus: Corpus, plan: Plan) -> Student:
    """A new student, or the one in `plan.start`. The vocabulary of a head is always that of the corpus."""
    torch.manual_seed(plan.seed)
    student = load_student(Path(plan.start), target) if plan.start else None
    # load_model returns frozen weights.
    if isinstance(student, ModelStudent):
        student.weights.requires_grad_(True)
        return student
    if plan.kind == "lm":
        return ModelStudent(_small_model(target.model, plan).to(target.model.device))
    head = student.head.requires_grad_(True) if student else _new_head(target.model)
    return _head_student(head, target, most_frequent_ids(corpus, plan.vocabulary, vocabulary_size(target.model)))


def load_student(folder: Path, target: Target) -> HeadStudent | ModelStudent:
    """The drafter in a folder, in float32. Raises UserError if there is none or if it does not fit the target."""
    if is_head(folder):
        head, vocabulary = read_head(folder, target.model)
        return _head_student(head, target, vocabulary)
    if not (folder / CONFIG_NAME).is_file():
        raise UserError(f"{folder} contains no drafter: give a folder that this command has written.")
    placement = Placement(str(target.model.device), torch.float32, lambda line: None)
    model = load_model(locate(str(folder), lambda line: None), "none", placement)
    if (size := vocabulary_size(model)) != (expected := vocabulary_size(target.model)):
        raise UserError(f"The drafter in {folder} has a vocabulary of {size:,} ids and the target one of {expected:,}.")
    return ModelStudent(model)


def save_student(student: Student, folder: Path, target: Target) -> None:
    """Write the drafter to a folder that `--drafter FOLDER` accepts."""
    if isinstance(student, HeadStudent):
        save_head(folder, HeadFile.of(student.head, student.ids, target.model))
    elif isinstance(student, ModelStudent):
        with quiet():
            student.model.save_pretrained(folder)
            target.tokenizer.save_pretrained(folder)


def _head_student(head: Head, target: Target, vocabulary: Tensor) -> HeadStudent:
    vocabulary = vocabulary.to(target.model.device)
    return HeadStudent(
        head.to(target.model.device), target.model.get_input_embeddings(), target.lm_head[vocabulary], vocabulary
    )


@torch.no_grad()
def _new_head(model: Any) -> Head:
    """Small random weights that pass the last feature through: at first a head repeats the previous prediction."""
    head = Head(shape_for(model, target_layers(model)))
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
