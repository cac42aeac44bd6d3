"""Training of a student. A batch depends only on the step number and the seed, so a resumed run continues exactly.

Matrices are trained with Muon (Jordan et al. 2024, in torch.optim), which needs less text, and the rest with AdamW.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from sampling.distill.loss import autocast_for, distillation_loss
from sampling.distill.options import TrainingPlan
from sampling.distill.pages import Corpus, TextPage
from sampling.distill.students import Student
from utils.files import replacing

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
        weights = list(student.head.parameters())
        matrices = [parameter for parameter in weights if parameter.dim() == 2]  # torch's Muon refuses anything else
        others = [parameter for parameter in weights if parameter.dim() != 2]
        muon = Muon if lm_head.dtype == torch.float32 else torch.optim.Muon
        self._optimizers: list[torch.optim.Optimizer] = [
            muon(matrices, lr=plan.rate, weight_decay=0.01),
            torch.optim.AdamW(others, lr=plan.rate_rest, weight_decay=0.0, betas=(0.9, 0.95)),
        ]
        self._rates = (plan.rate, plan.rate_rest)
        self._page_count = len(pages)
        self._loaded: tuple[int, TextPage] | None = None  # the current page and its number

    def train_step(self) -> None:
        """Train on the next batch."""
        page = self._batch()
        with autocast_for(self._lm_head):
            loss = distillation_loss(self.student, page, self._lm_head, self._plan.steps)
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
        """Write the weights, the optimizers' states and the step number."""
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
        # All batches of a page follow each other, so only one page is in memory.
        visit, part = divmod(self.step, per_page)
        epoch, place_in_order = divmod(visit, self._page_count)
        page = self._page(_shuffled(self._page_count, plan.seed, epoch)[place_in_order])
        order = torch.tensor(_shuffled(page.tokens.shape[0], plan.seed, visit))
        return page.rows(order.tensor_split(per_page)[part], self._lm_head.device)

    def _page(self, number: int) -> TextPage:
        if self._loaded is None or self._loaded[0] != number:
            self._loaded = number, self._pages.page(number)
        return self._loaded[1]


def _shuffled(count: int, seed: int, turn: int) -> list[int]:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + turn) % 2**63)
    return torch.randperm(count, generator=generator).tolist()
