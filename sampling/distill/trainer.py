"""Training, step by step: what is shown to the student is decided by the number of the step alone, so that a resumed run goes on exactly.

Matrices are trained with Muon, which gets farther with as much text (it orthogonalises updates; Jordan et al. 2024, in torch.optim),
everything else with AdamW. The state is kept in safetensors, written whole or not at all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sampling.distill.dataset import Corpus
from sampling.distill.generate import Page
from sampling.distill.loss import Acceptance, Student, count_acceptance, loss_of
from sampling.distill.options import Plan

WARM_UP = 20  # steps
STATE = "trainer.safetensors"


@dataclass(frozen=True, slots=True)
class Schooling:
    """pages: those to learn from. held_out: one that is never learnt from. head: the target's own (V, H)."""

    pages: Corpus
    held_out: Page
    head: Tensor


class Trainer:
    """student: who learns. step: how many were done. total: how many there will be."""

    def __init__(self, student: Student, schooling: Schooling, plan: Plan, total: int) -> None:
        self.student, self._schooling, self._plan, self.total = student, schooling, plan, total
        self.step, self.loss = 0, float("nan")
        self.whole = True  # whether no step is half done
        matrices = [
            part for name, part in student.weights.named_parameters() if part.dim() == 2 and "embed" not in name
        ]
        known = {id(part) for part in matrices}
        rest = [part for part in student.weights.parameters() if id(part) not in known]
        self._optimizers: list[Any] = [
            torch.optim.Muon(matrices, lr=plan.rate, weight_decay=0.01),
            torch.optim.AdamW(rest, lr=plan.rate_rest, weight_decay=0.0, betas=(0.9, 0.95)),
        ]
        self._rates = (plan.rate, plan.rate_rest)
        self._count = len(schooling.pages)
        self._held: tuple[int, Page] | None = None  # the page in hand

    def train(self) -> None:
        """One step."""
        page = self._batch()
        with mixed(self._schooling.head):
            loss = loss_of(self.student, page, self._schooling.head, self._plan.steps)
        loss.backward()
        value = loss.item()
        nn.utils.clip_grad_norm_(self.student.weights.parameters(), 1.0)
        self.whole = False
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * self._share()
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.loss = value if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * value
        self.whole = True

    def _share(self) -> float:
        """Of the learning rate: a short rise, then half a cosine down to a hundredth."""
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, self.step / max(1, self.total))))
        return min(1.0, (self.step + 1) / WARM_UP) * max(0.01, fall)

    def _batch(self) -> Page:
        """Rows of one page; which ones is told by the seed and the step."""
        plan = self._plan
        per_page = max(1, plan.rows // plan.batch)
        turn, part = divmod(self.step, per_page)
        around, place = divmod(turn, self._count)
        order = _shuffled(self._count, plan.seed, around)
        page = self._page(order[place])
        rows = torch.tensor(
            _shuffled(page.tokens.shape[0], plan.seed, turn)[part * plan.batch : (part + 1) * plan.batch]
        )
        device = self._schooling.head.device
        return page.rows(rows, device)

    def _page(self, number: int) -> Page:
        if self._held is None or self._held[0] != number:
            self._held = number, self._schooling.pages.page(number)
        return self._held[1]

    def acceptance(self, rows: int | None = None) -> Acceptance:
        """On the page that is held out, or so many rows of it."""
        held_out = self._schooling.held_out
        return measure(self.student, held_out.rows(slice(rows)), self._schooling.head, self._plan)

    def save(self, folder: Path) -> None:
        """All that is needed to go on."""
        parts = {f"weights.{name}": part.contiguous() for name, part in self.student.weights.state_dict().items()}
        for number, optimizer in enumerate(self._optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                parts |= {
                    f"optimizer.{number}.{index}.{name}": torch.as_tensor(value).contiguous()
                    for name, value in state.items()
                }
        about = {"step": str(self.step), "total": str(self.total), "loss": repr(self.loss)}
        save_file(_unshared(parts), folder / f"{STATE}.part", metadata=about)
        os.replace(folder / f"{STATE}.part", folder / STATE)

    def load(self, folder: Path) -> None:
        """Go on from what was saved."""
        parts = load_file(folder / STATE)
        with safe_open(folder / STATE, framework="pt") as file:
            about = file.metadata()
        self.step, self.total, self.loss = int(about["step"]), int(about["total"]), float(about["loss"])
        weights = {name.removeprefix("weights."): part for name, part in parts.items() if name.startswith("weights.")}
        self.student.weights.load_state_dict(weights, strict=False)  # tied weights are there once
        for number, optimizer in enumerate(self._optimizers):
            states: dict[int, dict[str, Tensor]] = {}
            for name, part in parts.items():
                kind, *path = name.split(".")
                if kind == "optimizer" and int(path[0]) == number:
                    states.setdefault(int(path[1]), {})[path[2]] = part
            optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def measure(student: Student, page: Page, head: Tensor, plan: Plan) -> Acceptance:
    """What a student's drafts of a page come to."""
    counts = Acceptance.empty(plan.steps)
    for rows in torch.arange(page.tokens.shape[0]).split(plan.batch):
        with mixed(head):
            count_acceptance(student, page.rows(rows, head.device), head, counts)
    return counts


def mixed(head: Tensor) -> Any:
    """Products in the target's own format where that is a short one."""
    short = head.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(head.device.type, head.dtype) if short else nullcontext()


def rounds(trainer: Trainer) -> Iterator[int]:
    """Train to the end; the number of each step done."""
    while trainer.step < trainer.total:
        trainer.train()
        yield trainer.step


def _shuffled(count: int, seed: int, turn: int) -> list[int]:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + turn) % 2**63)
    return torch.randperm(count, generator=generator).tolist()


def _unshared(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each storage once: the format knows no sharing."""
    seen: set[int] = set()
    kept = {}
    for name, part in parts.items():
        if part.data_ptr() not in seen or not part.numel():
            seen.add(part.data_ptr())
            kept[name] = part
    return kept
