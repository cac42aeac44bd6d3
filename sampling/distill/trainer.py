"""Training of a student. A batch depends only on the step number and the seed, so a resumed run continues exactly.

The loss is the cross entropy to the target over all steps of a draft. The acceptance is counted without decoding.
Matrices are trained with Muon (Jordan et al. 2024, in torch.optim), which needs less text, and the rest with AdamW.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, linear

from sampling.distill.options import TrainingPlan
from sampling.distill.pages import Corpus, TextPage
from sampling.distill.students import Student
from utils.files import replacing

STEP_DECAY = 0.8  # weight of a step's loss relative to the step before it
CHUNK = 128  # rows of logits at a time, few enough for the CPU cache
MEASURED_TOKENS = 2048  # at a time
# Acceptance rates by text ("greedy", "drawn") and position, None if nothing was counted.
Rates = dict[str, list[float | None]]


class _SoftCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of q = softmax(states @ [rows, extra].T) to p = softmax(target_states @ target_rows.T), and
    the acceptance sum_x min(p(x), q(x)) (N,), which has no gradient.

    The rows have none either: they are the target's. The gradients of the states and of `extra` are computed in the
    forward pass, in chunks, so that each logit is visited once, and few exist at a time.
    """

    @staticmethod
    def forward(
        context: Any, states: Tensor, rows: Tensor, extra: Tensor, target_states: Tensor, target_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        gradient, extra_gradient = torch.empty_like(states), torch.zeros_like(extra)
        total, overlap = torch.zeros((), device=states.device), states.new_empty(len(states), dtype=torch.float32)
        student_rows = torch.cat([rows, extra.to(rows.dtype)], dim=1).to(target_rows.dtype)
        for begin in range(0, len(states), CHUNK):
            chunk = slice(begin, begin + CHUNK)
            p = torch.softmax(linear(target_states[chunk], target_rows).float(), dim=-1)  # (chunk, V')
            own = states[chunk].to(target_rows.dtype)
            log_q = torch.log_softmax(linear(own, student_rows).float(), dim=-1)
            total -= torch.dot(p.flatten(), log_q.flatten())
            difference = log_q.exp_().sub_(p)  # q - p, the gradient of the logits
            overlap[chunk] = 1 - difference.norm(p=1, dim=-1) / 2
            difference = difference.to(target_rows.dtype)
            gradient[chunk] = difference @ student_rows
            extra_gradient += difference.T @ own[:, rows.shape[1] :]
        count = max(1, len(states))
        # The gradient itself instead of the logits, which would be (N, V').
        context.save_for_backward(gradient.div_(count), extra_gradient.div_(count))
        context.mark_non_differentiable(overlap)
        return total / count, overlap

    @staticmethod
    def backward(context: Any, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, extra_gradient = (part * output_gradients[0] for part in context.saved_tensors)
        return gradient, None, extra_gradient, None, None


_soft_cross_entropy: Callable[..., tuple[Tensor, Tensor]] = _SoftCrossEntropy.apply


def distillation_loss(student: Student, page: TextPage, lm_head: Tensor, steps: int, *, turn: int = 0) -> Tensor:
    """Weighted mean over steps of the cross entropy to the target, at the tokens that the target generated.

    lm_head: the target's output weight (V, H). Only the student's vocabulary is compared. turn: decides which entries
    are computed. A confidence learns the acceptance, and has no influence on the drafts.
    """
    entries, count = slice(turn % student.stride, None, student.stride), page.tokens.shape[1] - steps - 1
    last_hidden = page.features[..., -lm_head.shape[1] :].to(lm_head.dtype)  # (B, T, H)
    # Both softmaxes then run over V', so the target is renormalised to what the student can draft.
    target_rows = lm_head[student.vocabulary]
    losses = []
    for begin, states in enumerate(student.predictions(page, steps, entries), start=2):
        generated = page.generated[:, begin : begin + count][:, entries]
        # The hidden state at a token predicts the next token.
        target_states = last_hidden[:, begin - 1 : begin - 1 + count][:, entries][generated]
        own = states[generated]
        loss, overlap = _soft_cross_entropy(own, student.rows, student.extra, target_states, target_rows)
        if student.confidence is not None:
            logits = student.confidence(own.detach())[:, 0]
            loss = loss + binary_cross_entropy_with_logits(logits, overlap, reduction="sum") / max(1, len(own))
        losses.append(loss)
    weights = [STEP_DECAY**step for step in range(steps)]
    weighted = (weight * loss for weight, loss in zip(weights, losses, strict=True))
    return sum(weighted, start=lm_head.new_zeros((), dtype=torch.float32)) / sum(weights)


def autocast_for(lm_head: Tensor) -> AbstractContextManager[Any]:
    """Autocast to the target's number format if it has 16 bits."""
    short = lm_head.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(lm_head.device.type, lm_head.dtype) if short else nullcontext()


def measure_acceptance(
    student: Student, pages: Corpus, lm_head: Tensor, steps: int, *, tokens: int | None = None
) -> dict[int, Tensor]:
    """Counts (2, steps, 2) of accepted drafts, see count_acceptance, by the length of the conversations of a page.

    lm_head: the target's output weight (V, H). tokens: how many of each page, at least one row; None for all.
    """
    counts: dict[int, Tensor] = {}
    for page in map(pages.page, range(len(pages))):
        rows, length = page.tokens.shape
        rows = rows if tokens is None else min(rows, max(1, tokens // length))
        by_position = counts.setdefault(length, torch.zeros(2, steps, 2, dtype=torch.float64))
        for index in torch.arange(rows).split(max(1, MEASURED_TOKENS // length)):
            with autocast_for(lm_head):
                count_acceptance(student, page.rows(index, lm_head.device), lm_head, by_position)
    return counts


def rates_of(counts: Iterable[Tensor]) -> Rates:
    """The acceptance by position in the round, from all these counts. A rate is None if nothing was counted."""
    return {
        name: [accepted / count if count else None for accepted, count in by_position]
        for name, by_position in zip(("greedy", "drawn"), torch.stack([*counts]).sum(0).tolist(), strict=True)
    }


@torch.no_grad()
def count_acceptance(student: Student, page: TextPage, lm_head: Tensor, counts: Tensor) -> None:
    """Add the acceptance on a page to `counts` (2, steps, 2). Tokens outside the student's vocabulary are rejected.

    The first rows are for greedy answers, [accepted, counted]; a draft is counted if all earlier drafts of its round
    match. The others are for answers at temperature 1, [summed probability, count], where a draft is accepted with
    probability sum_x min(p(x), q(x)).
    """
    steps = counts.shape[1]
    # Rounds (M,) whose drafts are at least partly answers; most of a long page is documents.
    row, entry = page.answers[:, 2:].unfold(1, steps, 1).any(-1).nonzero(as_tuple=True)
    matching_prefix = torch.ones_like(row, dtype=torch.bool)
    temperatures = page.temperatures[row]
    for step, predicted in enumerate(student.predictions(page, steps)):
        position = entry + step + 2
        answers = page.answers[row, position]
        # The last feature is the input of the output head, so the target's logits need no forward pass.
        last_hidden = page.features[row, position - 1, -lm_head.shape[1] :].to(lm_head.dtype)
        all_rows = torch.cat([student.rows, student.extra], dim=1)
        states, rows = (part.to(lm_head.dtype) for part in (predicted[row, entry], all_rows))
        matches, overlap = _compare((states, rows), (last_hidden, lm_head), student.vocabulary)
        greedy, sampled = answers & matching_prefix & (temperatures == 0), answers & (temperatures == 1)
        accepted = (matches & greedy).sum(), overlap[sampled].sum()
        for kind, (summed, counted) in enumerate(zip(accepted, (greedy, sampled), strict=True)):
            counts[kind, step] += torch.tensor([summed.item(), counted.sum().item()], dtype=torch.float64)
        matching_prefix = matching_prefix & matches


def _compare(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], vocabulary: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the likeliest tokens match (M,), and the overlap sum_x min(p(x), q(x)) (M,).

    ours, theirs: states (M, H) and output rows of the student and of the target.
    """
    matches, overlaps = [], []
    for pair in zip(ours[0].split(CHUNK), theirs[0].split(CHUNK), strict=True):
        logits, target_logits = (linear(x, rows).float() for x, rows in zip(pair, (ours[1], theirs[1]), strict=True))
        matches.append(vocabulary[logits.argmax(-1)] == target_logits.argmax(-1))
        # p is not renormalised: what the student cannot draft is lost acceptance.
        overlaps.append(torch.minimum(target_logits.softmax(-1)[:, vocabulary], logits.softmax(-1)).sum(-1))
    return torch.cat(matches), torch.cat(overlaps)


WARM_UP_STEPS = 20
STATE_FILE = "trainer.safetensors"


class Muon(torch.optim.Muon):
    """torch's optimizer without bfloat16, in which it orthogonalizes: processors without instructions for that take
    many times as long as for float32.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    own = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight.grad))
                    own.lerp_(weight.grad, 1 - group["momentum"])
                    update = _orthogonalized(weight.grad.lerp(own, group["momentum"]), group)
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-group["lr"] * math.sqrt(max(1, weight.shape[0] / weight.shape[1])))


def _orthogonalized(x: Tensor, group: dict[str, Any]) -> Tensor:
    """x (N, K) with singular values of about 1, by the Newton-Schulz iteration of Muon."""
    if len(x) > x.shape[1]:
        return _orthogonalized(x.T, group).T
    a, b, c = group["ns_coefficients"]
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Trainer:
    """Trains a student on pages for `total` steps, of which `step` are done. `loss` is a running mean.

    lm_head: the target's output weight (V, H).
    """

    def __init__(self, student: Student, pages: Corpus, lm_head: Tensor, plan: TrainingPlan) -> None:
        self.student, self._pages, self._lm_head, self._plan = student, pages, lm_head, plan
        self.total = max(1, len(pages) * (plan.page // plan.batch) * plan.passes)
        self.step, self.loss = 0, float("nan")
        self.is_consistent = True  # False while only some of the weights have made the current step
        matrices, others = list[Tensor](), list[Tensor]()
        for name, weight in student.head.named_parameters():
            is_matrix = weight.dim() == 2 and not name.startswith(student.tables)  # torch's Muon refuses vectors
            (matrices if is_matrix else others).append(weight)
        muon = Muon if lm_head.dtype == torch.float32 else torch.optim.Muon
        self._optimizers: list[torch.optim.Optimizer] = [
            muon(matrices, lr=plan.rate, weight_decay=0.01),
            torch.optim.AdamW(others, lr=plan.rate_rest, weight_decay=0.0, betas=(0.9, 0.95)),
        ]
        self._rates = (plan.rate, plan.rate_rest)
        self._page_count = len(pages)

    def train_step(self) -> None:
        page = self._batch()
        with autocast_for(self._lm_head):
            loss = distillation_loss(self.student, page, self._lm_head, self._plan.steps, turn=self.step)
        loss.backward()
        # Waits for a GPU to finish, before any weight is changed.
        value = loss.item()
        nn.utils.clip_grad_norm_(self.student.head.parameters(), 1.0)
        self.is_consistent = False
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * self._schedule()
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.loss = value if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * value
        self.is_consistent = True

    def save(self, folder: Path) -> None:
        tensors = {f"weights.{name}": part.contiguous() for name, part in self.student.head.state_dict().items()}
        for number, optimizer in enumerate(self._optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                for name, value in state.items():
                    tensors[f"optimizer.{number}.{index}.{name}"] = torch.as_tensor(value).contiguous()
        # safetensors stores texts only.
        metadata = {"step": str(self.step), "total": str(self.total), "loss": repr(self.loss)}
        with replacing(folder / STATE_FILE) as file:
            file.write(save(tensors, metadata=metadata))

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        with safe_open(folder / STATE_FILE, framework="pt") as file:
            names = file.keys()
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in names}
        self.step, self.total, self.loss = int(metadata["step"]), int(metadata["total"]), float(metadata["loss"])
        weights = {name.removeprefix("weights."): part for name, part in tensors.items() if name.startswith("weights.")}
        self.student.head.load_state_dict(weights)
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self._optimizers]
        for name, part in tensors.items():
            if name.startswith("optimizer."):
                _, number, index, key = name.split(".")
                states[int(number)].setdefault(int(index), {})[key] = part
        for optimizer, state in zip(self._optimizers, states, strict=True):
            # The groups of the new optimizer suffice: only their rate changes, and every step sets it.
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

    def _schedule(self) -> float:
        """The factor of the learning rates: a short linear warm-up, then half a cosine down to 0.01."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.step / max(1, self.total))))
        return min(1.0, (self.step + 1) / WARM_UP_STEPS) * max(0.01, cosine)

    def _batch(self) -> TextPage:
        """Some rows of one page, both in a random order that the seed determines."""
        plan = self._plan
        per_page = plan.page // plan.batch
        # All batches of a page follow each other, so that its part of the file is read once.
        visit, part = divmod(self.step, per_page)
        epoch, place_in_order = divmod(visit, self._page_count)
        page = self._pages.page(_shuffled(self._page_count, plan.seed, epoch)[place_in_order])
        order = torch.tensor(_shuffled(page.tokens.shape[0], plan.seed, visit))
        return page.rows(order.tensor_split(per_page)[part], self._lm_head.device)


def _shuffled(count: int, seed: int, turn: int) -> list[int]:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + turn) % 2**63)
    return torch.randperm(count, generator=generator).tolist()
