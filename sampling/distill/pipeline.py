"""A distillation from start to end: generate text, train the student, measure it, and write it with a model card.

Everything finished is on disk: pages, checkpoints, time spent. An interruption loses the current page, or the steps
since the last checkpoint.
"""

from __future__ import annotations

import json
import math
import platform
import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from sampling.distill.chat_script import MAX_QUESTION_TOKENS, QUESTION_TEMPERATURE, Script
from sampling.distill.loss import measure_acceptance
from sampling.distill.options import TRAINING_FILE, Options, public_settings, save_plan
from sampling.distill.pages import ANSWER_TEMPERATURES, Corpus, PageGenerator, TextPage
from sampling.distill.progress import (
    ProgressReporter,
    Rates,
    Report,
    TrainingProgress,
    advice,
    missing_text,
    rate_text,
    rates_text,
    write_json,
)
from sampling.distill.students import (
    Student,
    create_student,
    load_student,
    load_target,
    planned_layers,
    save_student,
)
from sampling.distill.trainer import STATE_FILE, Trainer, TrainingData
from utils.decode.model_info import context_length
from utils.errors import UserError
from utils.prompts.chat_template import end_ids
from utils.prompts.prompt_files import read_prompts

FIRST_TRAINING_SEED = 1000  # of a page; lower seeds are for held-out pages
CHECKPOINT_SECONDS = 120.0
EVALUATIONS, EVALUATION_ROWS = 20, 24  # during training, on part of the held-out page
EVALUATION_SECONDS = 60.0  # of training between two reports of them
GENERATION_SHARE = 0.45  # of --hours
TIMED_STEPS = 10  # steps after which the training is shortened to what --hours leave
MIN_FREE_TOKENS = 16  # tokens of a conversation besides the template's
KINDS = {
    "eagle3": "one decoder layer in the EAGLE-3 format of the package speculators (arXiv 2503.01840, 2605.09992); "
    "target.json tells its target apart",
}


class Distillation:
    """A loaded target and what to do with it."""

    def __init__(self, options: Options, report: Report) -> None:
        plan = options.plan
        questions = _questions(Path(plan.prompts)) if plan.prompts else []
        self._target = load_target(plan.target, plan.device, report)
        self._options, self._report = options, report
        model, tokenizer = self._target.model, self._target.tokenizer
        script = Script.from_tokenizer(tokenizer, end_ids(model, tokenizer), questions)
        self._plan = replace(plan, length=min(plan.length, context_length(model) or plan.length))
        if (least := len(script.prefix) + len(script.answer_prefix) + MIN_FREE_TOKENS) > self._plan.length:
            raise UserError(
                f"--length {self._plan.length} is too short for this target's chat template: choose at least {least}."
            )
        if plan.start and not options.measure:
            self._check_start(Path(plan.start))
        target = self._target
        layers = load_student(options.out, target).layers if options.measure else planned_layers(plan, target)
        self._generator = PageGenerator(model, script, layers, rows=plan.rows, length=self._plan.length)
        self._page_tokens = self._generator.page_tokens
        self._pages = -(-plan.tokens // self._page_tokens)  # of training text, besides the held-out one
        self._has_questions = bool(questions)
        self._evaluated = 0.0  # seconds of training at the last report of the held-out page

    def run(self) -> None:
        """Generate, train and write. KeyboardInterrupt passes through; the work can then be resumed."""
        options, work = self._options, self._options.work
        save_plan(options)
        self._report(self._plan_text())
        progress = TrainingProgress.load(work)
        corpus = Corpus(work / "pages")
        held_out = self._prepare()
        self._generate(corpus, progress)
        trainer = self._trainer(corpus, held_out)
        self._train(trainer, progress)
        save_student(trainer.student, options.out, self._target, corpus)
        rates = self._measured(load_student(options.out, self._target), held_out)  # the stored weights are rounded
        write_card(
            options, progress, rates, generated=corpus.generated_tokens, steps=trainer.step, model=self._target.model
        )
        for line in advice(rates, options.out, options.plan.target):
            self._report(line)
        if not options.keep:
            finished = work.replace(work.with_name("work.done"))  # a work folder that exists is always complete
            shutil.rmtree(finished, ignore_errors=True)

    def _plan_text(self) -> str:
        """What will be generated, and in which number format. Only whole pages are generated."""
        plan, model = self._plan, self._target.model
        total = self._pages * self._page_tokens
        rounded = f" (--tokens {plan.tokens:,}, rounded up to whole pages)" if total != plan.tokens else ""
        return (
            f"generating {self._pages:,} x {plan.rows} conversations of {plan.length} tokens, {total:,} in all"
            f"{rounded}, and {plan.rows} held-out ones. Then {plan.passes} passes of training. All in "
            f"{str(model.dtype).removeprefix('torch.')} on {model.device}."
        )

    def _prepare(self) -> TextPage:
        """The held-out page."""
        corpus = Corpus(self._options.work / "held-out")
        if not len(corpus):
            corpus.add(self._page(0, self._reporter("generating the held-out page", 0, self._page_tokens)))
        return corpus.page(0)

    def measure(self) -> None:
        """Report the acceptance of the drafter in the folder on the held-out page, which is generated again."""
        student = load_student(self._options.out, self._target)
        self._measured(student, self._page(0, self._reporter("generating", 0, self._page_tokens)))

    def _check_start(self, folder: Path) -> None:
        """Raise UserError, before hours of generation, if the drafter in the folder cannot be trained further."""
        student = load_student(folder, self._target)
        if (kind := student.kind) != self._plan.kind:
            raise UserError(f"The drafter in {folder} is of kind {kind}: add --kind {kind} to continue training it.")

    def _measured(self, student: Student, page: TextPage) -> Rates:
        plan = self._plan
        rates = measure_acceptance(student, page, self._target.lm_head, steps=plan.steps, batch=plan.batch)
        self._report(f"{self._options.out}: {rates_text(rates)}")
        for line in missing_text(rates, plan.rows, plan.length):
            self._report(line)
        return rates

    def _page(self, number: int, reporter: ProgressReporter) -> TextPage:
        # Neighbouring seeds of the plan must not share pages.
        seed = self._plan.seed * 100_000 + number
        return self._generator.generate(seed, complete=self._has_questions, on_tokens=reporter.advance)

    def _generate(self, corpus: Corpus, progress: TrainingProgress) -> None:
        limit = self._plan.hours * 3600 * GENERATION_SHARE or math.inf  # 0 hours means no limit
        done, total = (pages * self._page_tokens for pages in (len(corpus), self._pages))
        reporter = self._reporter("generating", done, total)
        # At least one page, however short the time: training needs text.
        while len(corpus) < self._pages and (progress.writing < limit or not len(corpus)):
            started = time.monotonic()
            corpus.add(self._page(FIRST_TRAINING_SEED + len(corpus), reporter))
            progress.writing += time.monotonic() - started
            progress.save(self._options.work)

    def _trainer(self, corpus: Corpus, held_out: TextPage) -> Trainer:
        plan = self._plan
        total = max(1, len(corpus) * (plan.rows // plan.batch) * plan.passes)
        data = TrainingData(corpus, held_out, self._target.lm_head)
        trainer = Trainer(create_student(self._target, corpus, plan), data, plan, total)
        if (self._options.work / STATE_FILE).is_file():
            trainer.load(self._options.work)
            self._report(f"resuming at step {trainer.step} of {trainer.total}")
        return trainer

    def _train(self, trainer: Trainer, progress: TrainingProgress) -> None:
        step_tokens = self._plan.batch * self._plan.length
        earlier = progress.training
        saved = started = time.monotonic()
        reporter = self._reporter("training", trainer.step * step_tokens, trainer.total * step_tokens)
        try:
            while trainer.step < trainer.total:
                trainer.train_step()
                now = time.monotonic()
                progress.training = earlier + now - started
                # Early, because the learning rate follows a cosine over the total number of steps.
                if self._plan.hours and trainer.step == TIMED_STEPS:
                    self._shorten(trainer, progress)
                    reporter.total = trainer.total * step_tokens
                if trainer.step % max(1, trainer.total // EVALUATIONS) == 0:
                    self._evaluate(trainer, progress)
                if now - saved > CHECKPOINT_SECONDS:
                    saved = now
                    self._save_checkpoint(trainer, progress)
                reporter.advance(step_tokens, f", loss {trainer.loss:.2f}")
        finally:
            if trainer.is_consistent:  # otherwise the last checkpoint stays
                self._save_checkpoint(trainer, progress)

    def _evaluate(self, trainer: Trainer, progress: TrainingProgress) -> None:
        """Add a point to the curve, from part of the held-out page."""
        rates = trainer.acceptance(EVALUATION_ROWS)
        tokens = trainer.step * self._plan.batch * self._plan.length
        progress.curve.append({"tokens": tokens, "seconds": round(progress.training, 1), "loss": trainer.loss} | rates)
        if progress.training - self._evaluated < EVALUATION_SECONDS and trainer.step < trainer.total:
            return  # the card has all of the curve
        self._evaluated = progress.training
        self._report(f"step {trainer.step} of {trainer.total}, loss {trainer.loss:.2f}, held out: {rates_text(rates)}")

    def _save_checkpoint(self, trainer: Trainer, progress: TrainingProgress) -> None:
        trainer.save(self._options.work)
        progress.save(self._options.work)

    def _shorten(self, trainer: Trainer, progress: TrainingProgress) -> None:
        """Reduce the number of steps to what fits into the remaining time."""
        seconds_left = self._plan.hours * 3600 - progress.writing - progress.training
        steps_left = int(seconds_left / (progress.training / TIMED_STEPS))
        trainer.total = max(TIMED_STEPS, min(trainer.total, TIMED_STEPS + steps_left))

    def _reporter(self, task: str, done: int, total: int) -> ProgressReporter:
        return ProgressReporter(self._report, task, done, total)


def _questions(file: Path) -> list[str]:
    questions = [prompt.text for prompt in read_prompts(file)]
    if not questions:
        raise UserError(f"The prompts file {file} contains no prompt: write one per line.")
    return questions


def write_card(
    options: Options, progress: TrainingProgress, rates: Rates, *, generated: int, steps: int, model: Any
) -> None:
    """Write README.md and the settings next to the weights. generated: tokens by the target.

    Raises UserError if writing fails.
    """
    plan = options.plan
    settings = public_settings(plan)
    lines = [
        f"# Drafter for {model.name_or_path}",
        "",
        f"Kind: {plan.kind}, {KINDS[plan.kind]}. A drafter changes the speed of decoding, never its distribution.",
        "",
        *_acceptance_table(rates),
        "",
        *missing_text(rates, plan.rows, plan.length),
        f"Measured on {plan.rows} held-out conversations, generated by the target from a seed of their own. To repeat:",
        "",
        f"    python -m sampling.distill --measure --out FOLDER {_flags(settings)}",
        "",
        "## Training",
        "",
        f"- Text: {generated:,} tokens generated by the target in its chat template; answers at temperatures "
        f"{', '.join(map(str, ANSWER_TEMPERATURES))} in turn; {_origin(plan.prompts)}.",
        *(["- Training continued from an earlier drafter (`--start`)."] if plan.start else []),
        f"- Training: {steps:,} steps of {plan.batch} conversations of {plan.length} tokens, unrolled over "
        f"{plan.steps} drafts, cross entropy to the target's distributions; Muon at {plan.rate}, AdamW at "
        f"{plan.rate_rest} for vectors and embeddings, cosine schedule.",
        f"- Time: {progress.writing / 3600:.2f} h of generation, {progress.training / 3600:.2f} h of training.",
        f"- Machine: {_machine(model)}.",
        "",
        *_curve_table(progress),
        "",
        "Settings: `" + json.dumps(settings) + "`",
        "",
    ]
    try:
        (options.out / "README.md").write_text("\n".join(lines), encoding="utf-8")
        write_json(options.out / TRAINING_FILE, settings)
    except OSError as error:
        raise UserError(f"{options.out} cannot be written: {error.strerror or error}.") from error


def _flags(settings: dict[str, Any]) -> str:
    """The flags that --measure cannot read from the folder."""
    return " ".join(f"--{name} {shlex.quote(settings[name])}" for name in ("target", "prompts") if settings[name])


def _acceptance_table(rates: Rates) -> list[str]:
    return [
        f"| position of the draft in its round | {' | '.join(str(n + 1) for n in range(len(rates['greedy'])))} |",
        "|---" * (len(rates["greedy"]) + 1) + "|",
        f"| greedy text: acceptance, given that earlier drafts were accepted | {_cells(rates['greedy'])} |",
        f"| text sampled at T = 1: probability of acceptance | {_cells(rates['drawn'])} |",
    ]


def _cells(rates: list[float | None]) -> str:
    return " | ".join(map(rate_text, rates))


def _curve_table(progress: TrainingProgress) -> list[str]:
    return [
        "| tokens trained on | seconds | loss | greedy, position 1 | at T = 1, position 1 |",
        "|---|---|---|---|---|",
        *(
            f"| {point['tokens']:,} | {point['seconds']:.0f} | {point['loss']:.2f} "
            f"| {rate_text(point['greedy'][0])} | {rate_text(point['drawn'][0])} |"
            for point in progress.curve
        ),
    ]


def _origin(prompts: str | None) -> str:
    if prompts:
        return "questions from a file"
    return (
        f"questions by the target at temperature {QUESTION_TEMPERATURE}, at most {MAX_QUESTION_TOKENS} tokens, "
        "most with a given beginning"
    )


def _machine(model: Any) -> str:
    if model.device.type == "cuda":
        hardware = torch.cuda.get_device_name(model.device)
    else:
        hardware = f"{torch.get_num_threads()} CPU threads"
    return (
        f"{hardware}, {str(model.dtype).removeprefix('torch.')}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}"
    )
