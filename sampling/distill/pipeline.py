"""A distillation from beginning to end: the target writes, the student learns, the result is measured, kept and described.

What is finished is on disk: written pages, checkpoints, the time spent. Ctrl-C or a crash costs the page in hand, or the steps since the
last checkpoint, and nothing else.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sampling.distill.chat_script import Script
from sampling.distill.dataset import Corpus
from sampling.distill.generate import Page, Writer
from sampling.distill.model_card import write_card
from sampling.distill.options import Order, keep_plan, write_json
from sampling.distill.progress import Report, Teller, said
from sampling.distill.students import begin, finished, keep, target_layers
from sampling.distill.trainer import STATE, Schooling, Trainer, measure, rounds
from utils.decode.model_session import context_length
from utils.errors import UserError
from utils.models.checkpoints import load_model, load_tokenizer
from utils.models.devices import Placement, choose_device
from utils.models.gguf import converted
from utils.models.head_file import is_head
from utils.models.sources import locate
from utils.prompts.chat_template import end_ids
from utils.prompts.prompt_files import read_prompts

WRITING_SHARE = 0.45  # of the hours
FIRST_SEED = 1000  # of a page to learn from; those below are for pages held out
CHECKPOINT_SECONDS = 120.0
LOOKS, LOOK_ROWS = 20, 24  # at so many rows of the held-out page, while training
TIMED = 10  # steps, by which the length of the training is reckoned
LEAST = 16  # tokens of a conversation besides the template's first ones


@dataclass(slots=True)
class Progress:
    """What the work has taken so far. curve: (tokens learnt from, seconds, rates) at each look."""

    writing: float = 0.0
    training: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        write_json(folder / "progress.json", asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Progress:
        file = folder / "progress.json"
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else cls()


class Workshop:
    """A target, loaded, and an order to carry out."""

    def __init__(self, order: Order, report: Report) -> None:
        self._order, self._report = order, report
        questions = _questions(order.plan.prompts)
        device = choose_device(order.plan.device)
        where = Placement(device, number_format(device), report)
        source = converted(locate(order.plan.target, report), where)
        self.target = load_model(source, "none", where)
        tokenizer = load_tokenizer(source)
        if tokenizer is None:
            raise UserError(
                f"'{source.name}' has no tokenizer files: copy tokenizer.json and tokenizer_config.json next to the weights."
            )
        self._tokenizer = tokenizer
        self._head = _head_of(self.target)
        script = Script.of(tokenizer, end_ids(self.target, tokenizer), questions)
        self._plan = replace(
            order.plan, length=min(order.plan.length, context_length(self.target) or order.plan.length)
        )
        if (least := len(script.head) + len(script.to_answer) + LEAST) > self._plan.length:
            raise UserError(
                f"Conversations of {self._plan.length} tokens are too short here: --length must be at least {least}."
            )
        self._writer = Writer(
            self.target, script, target_layers(self.target), rows=order.plan.rows, length=self._plan.length
        )
        self._asked = bool(questions)
        if order.plan.start and not order.measure:
            self._check_start(Path(order.plan.start))

    def _check_start(self, folder: Path) -> None:
        """Before hours of writing. Raises UserError where it cannot be gone on from."""
        kind = "head" if is_head(folder) else "lm"
        finished(folder, self.target)
        if kind != self._plan.kind:
            raise UserError(f"The drafter in {folder} is of kind {kind}: add --kind {kind} to go on from it.")

    def make(self) -> None:
        """Write, train, keep. Raises KeyboardInterrupt when interrupted; the work can then be resumed."""
        order, work = self._order, self._order.work
        keep_plan(order)
        progress = Progress.load(work)
        corpus = Corpus(work / "pages")
        held_out = self._held_out(Corpus(work / "held-out"))
        self._write(corpus, progress)
        trainer = self._trainer(corpus, held_out)
        self._train(trainer, progress)
        keep(trainer.student, order.out, self.target, self._tokenizer)
        rates = measure(
            finished(order.out, self.target), held_out, self._head, self._plan
        ).rates()  # of what was kept, which is rounded
        write_card(order, progress, rates, written=corpus.count, steps=trainer.step, target=self.target)
        self._report(f"{order.out}: {said(rates)}")
        if not order.keep:
            done = work.replace(work.with_name("work.done"))  # whole or not there
            shutil.rmtree(done, ignore_errors=True)

    def measure(self) -> dict[str, list[float | None]]:
        """Acceptance of the drafter in the folder, on a page that is written anew from the plan's seed."""
        student = finished(self._order.out, self.target)
        page = self._writer.write(
            self._seed(0), asked=self._asked, tell=self._teller("writing", 0, self._writer.tokens)
        )
        rates = measure(student, page, self._head, self._plan).rates()
        self._report(f"{self._order.out}: {said(rates)}")
        return rates

    def _seed(self, number: int) -> int:
        return self._plan.seed * 100_000 + number

    def _held_out(self, shelf: Corpus) -> Page:
        if not len(shelf):
            tell = self._teller("writing what is held out", 0, self._writer.tokens)
            shelf.add(self._writer.write(self._seed(0), asked=self._asked, tell=tell))
        return shelf.page(0)

    def _write(self, corpus: Corpus, progress: Progress) -> None:
        wanted = -(-self._plan.tokens // self._writer.tokens)  # pages
        limit = self._plan.hours * 3600 * WRITING_SHARE or float("inf")
        tell = self._teller("writing", len(corpus) * self._writer.tokens, wanted * self._writer.tokens)
        while len(corpus) < wanted and (progress.writing < limit or not len(corpus)):
            began = time.monotonic()
            corpus.add(self._writer.write(self._seed(FIRST_SEED + len(corpus)), asked=self._asked, tell=tell))
            progress.writing += time.monotonic() - began
            progress.save(self._order.work)

    def _trainer(self, corpus: Corpus, held_out: Page) -> Trainer:
        plan = self._plan
        total = max(1, len(corpus) * (plan.rows // plan.batch) * plan.passes)
        trainer = Trainer(begin(self.target, corpus, plan), Schooling(corpus, held_out, self._head), plan, total)
        if (self._order.work / STATE).is_file():
            trainer.load(self._order.work)
            self._report(f"going on at step {trainer.step} of {trainer.total}")
        return trainer

    def _train(self, trainer: Trainer, progress: Progress) -> None:
        per_step = self._plan.batch * self._plan.length
        before = progress.training
        kept = began = time.monotonic()
        teller = Teller(self._report, "training", trainer.step * per_step, trainer.total * per_step)
        try:
            for step in rounds(trainer):
                now = time.monotonic()
                progress.training = before + now - began
                if self._plan.hours and step == TIMED:
                    self._shorten(trainer, progress)
                    teller.wanted = trainer.total * per_step
                if step % max(1, trainer.total // LOOKS) == 0:
                    self._look(trainer, progress)
                if now - kept > CHECKPOINT_SECONDS:
                    kept = now
                    self._checkpoint(trainer, progress)
                teller.tell(per_step, f", loss {trainer.loss:.2f}")
        finally:
            if trainer.whole:  # else the last checkpoint is what there is
                self._checkpoint(trainer, progress)

    def _look(self, trainer: Trainer, progress: Progress) -> None:
        """Acceptance on a part of what is held out."""
        rates, tokens = trainer.acceptance(LOOK_ROWS).rates(), trainer.step * self._plan.batch * self._plan.length
        progress.curve.append({"tokens": tokens, "seconds": round(progress.training, 1), "loss": trainer.loss} | rates)
        self._report(f"step {trainer.step} of {trainer.total}, loss {trainer.loss:.2f}, held out: {said(rates)}")

    def _checkpoint(self, trainer: Trainer, progress: Progress) -> None:
        trainer.save(self._order.work)
        progress.save(self._order.work)

    def _shorten(self, trainer: Trainer, progress: Progress) -> None:
        """As many steps as the hours still hold."""
        left = self._plan.hours * 3600 - progress.writing - progress.training
        trainer.total = max(TIMED, min(trainer.total, TIMED + int(left / (progress.training / TIMED))))

    def _teller(self, what: str, made: int, wanted: int) -> Callable[[int], None]:
        return Teller(self._report, what, made, wanted).tell


def _questions(file: str | None) -> list[str]:
    found = [prompt.text for prompt in read_prompts(Path(file))] if file else []
    if file and not found:
        raise UserError(f"The prompts file {file} holds no prompt: write one a line.")
    return found


def number_format(device: str) -> torch.dtype:
    """bfloat16 where the hardware multiplies in it."""
    if device == "cpu":
        able = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        able = device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if able else torch.float32


@torch.no_grad()
def _head_of(target: Any) -> torch.Tensor:
    """The weight (V, H) whose product with the last hidden state is the target's logits. Raises UserError where there is none."""
    if target.config.is_encoder_decoder:
        raise UserError(f"{target.name_or_path} is an encoder-decoder model: drafters are made for decoder-only ones.")
    if getattr(target, "_is_stateful", False):
        raise UserError(f"{target.name_or_path} is a recurrent model: drafters are made for models with attention.")
    ids = torch.arange(8, device=target.device)[None] % target.config.get_text_config(decoder=True).vocab_size
    output = target(input_ids=ids, output_hidden_states=True, use_cache=False)
    layer = target.get_output_embeddings()
    weight = getattr(layer, "weight", None)
    if weight is None or getattr(layer, "bias", None) is not None or weight.dim() != 2:
        raise UserError(
            f"The logits of {target.name_or_path} are no plain product of its hidden state: no drafter can be made for it."
        )
    made = torch.nn.functional.linear(output.hidden_states[-1], weight).float()
    if (made - output.logits.float()).norm() > 0.05 * output.logits.float().norm():
        raise UserError(
            f"{target.name_or_path} changes its logits behind its head (a cap or a scale): no drafter can be made for it."
        )
    return weight.detach()
