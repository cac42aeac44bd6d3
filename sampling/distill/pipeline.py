"""A distillation from start to end: generate text, train the student, measure it, and write it with a model card.

Everything finished is on disk: pages, checkpoints, time spent. An interruption loses the current page, or the steps
since the last checkpoint.
"""

import json
import math
import platform
import shlex
import shutil
import time
from bisect import bisect_right
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor

from sampling.distill import students
from sampling.distill.options import PLAN_FILE, Options, public_settings, write_json
from sampling.distill.pages import ANSWER_TEMPERATURES, PASS_TOKENS, SHARES, Corpus, PageGenerator, Script
from sampling.distill.trainer import STATE_FILE, Rates, Trainer, measure_acceptance, rates_of
from utils.decode.features import layer_count
from utils.decode.model_info import cache_bytes, context_length, vocabulary_size
from utils.engine.layer_engine import PlainEngine
from utils.engine.stored_weights import fill
from utils.engine.trials import PLAIN
from utils.errors import UserError
from utils.freed_memory import release_memory
from utils.models import Reporter
from utils.models.memory import free_bytes
from utils.prompts.conversation import end_ids
from utils.prompts.prompt_files import read_prompts
from utils.text import byte_size, count_of

FIRST_TRAINING_SEED = 1000  # of a page; lower seeds are for held-out pages
CHECKPOINT_SECONDS = 120.0
EVALUATION_TOKENS = 2048  # during training, of each held-out page
EVALUATION_PAUSE = 9  # times as long as an evaluation took, until the next one
HELD_OUT_SHARE = 4  # held-out pages are smaller than those of training text by this factor
GENERATION_SHARE = 0.45  # of --hours
TIMED_STEPS = 10  # steps after which the training is shortened to what --hours leave
MIN_FREE_TOKENS = 16  # tokens of a conversation besides the template's
SPARE_KEYS = 1.5  # capacity of a KV cache that grows by half
# Numbers for each token of a pass besides its hidden states, measured with the embedded target: for each number of a
# state, and of the width of the MLP.
OF_PASS, OF_MLP = 36, 4
# Numbers of 4 bytes in a training step, measured with targets of 0.1 and 0.4 billion weights: for each weight of the
# drafter, and by its kind for each number of the states of its drafts, and for each score of their attention.
OF_WEIGHTS, OF_STATES, OF_SCORES = 5, {"eagle3": 45, "block": 64}, {"eagle3": 2, "block": 1}
MUON_ITERATIONS = 5  # of torch's optimizer
REPORT_SECONDS = 15.0
LOW_ACCEPTANCE = 0.2  # of the first draft of a round; below, drafting costs more than it saves
PROGRESS_FILE = "progress.json"
INVARIANT = "invariant"  # the engine, in plan.json


class ProgressReporter:
    """Reports the progress of one task from time to time. done, total: tokens finished at the start and at the end."""

    def __init__(self, report: Reporter, task: str, done: int, total: int) -> None:
        self._report, self._task, self._done, self.total = report, task, done, total
        # After a resume the speed counts only what this process has done.
        self._initial, self._started = done, time.monotonic()
        self._last_report = self._started

    def advance(self, tokens: int, remark: str = "") -> None:
        """Count `tokens` more, and report if the last report is long enough ago."""
        self._done += tokens
        now = time.monotonic()
        if now - self._last_report > REPORT_SECONDS:
            self._last_report, speed = now, (self._done - self._initial) / (now - self._started)
            left = timedelta(seconds=round(max(0, self.total - self._done) / speed))
            self._report(
                f"{self._task}: {self._done:,} of {self.total:,} tokens, {speed:,.0f} tokens/s{remark}, {left} left"
            )


def rate_text(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3f}"


def rates_text(rates: Rates) -> str:
    greedy, sampled = (" ".join(map(rate_text, rates[name])) for name in ("greedy", "drawn"))
    return f"greedy acceptance {greedy}, at T = 1 {sampled}"


def advice(rates: Rates, out: Path, target: str) -> list[str]:
    """What to do with a finished drafter: how to load it, and whether it is worth that."""
    lines = [f"load it with: infer.py --target {shlex.quote(target)} --drafter {shlex.quote(str(out))}"]
    first = [values[0] for values in rates.values() if values[0] is not None]
    if first and max(first) < LOW_ACCEPTANCE:
        lines.append(
            f"fewer than {LOW_ACCEPTANCE:.0%} of first drafts are accepted, so this drafter is unlikely to save time: "
            f"generate more text (--tokens), train longer (--passes), or go on with --start {shlex.quote(str(out))}"
        )
    return lines


class Distillation:
    """A loaded target and what to do with it."""

    def __init__(self, options: Options, report: Reporter) -> None:
        plan = options.plan
        questions = [prompt.text for prompt in read_prompts(Path(plan.prompts))] if plan.prompts else []
        self._target = students.load_target(plan.target, plan.device, report)
        self._options, self._report, self._kind = options, report, students.STUDENTS[plan.kind]
        self._seconds = {"writing": 0.0, "training": 0.0}  # of generation and training so far
        model, tokenizer = self._target.model, self._target.tokenizer
        script = Script.from_tokenizer(tokenizer, end_ids(model, tokenizer), questions)
        self._plan = replace(plan, length=min(plan.length, context_length(model) or plan.length))
        shortest = min((len(script.encode(text)) for text in questions), default=0)
        if (least := len(script.prefix) + shortest + len(script.answer_prefix) + MIN_FREE_TOKENS) > self._plan.length:
            inserted = "chat template" + " and the shortest prompt" * bool(questions)
            raise UserError(
                f"--length {self._plan.length} is too short for this target's {inserted}: choose at least {least}."
            )
        layers = students.planned_layers(plan, self._target)  # before hours of generation: it may not be trainable
        self._new_generator = partial(PageGenerator, model, script, layers, length=self._plan.length)
        self._generator = self._new_generator()
        self._speed = self._generator.speed(plan.page)  # of PyTorch, which trains
        self._token_bytes = 2 * len(layers) * self._target.lm_head.shape[1]  # of a token's hidden states
        self._held_out_pages = 1 if questions else len(SHARES)  # one for each length of conversations

    def run(self) -> None:
        """Generate, train and write. KeyboardInterrupt passes through; the work can then be resumed."""
        options, work, target = self._options, self._options.work, self._target
        self._check_budget()
        work.mkdir(parents=True, exist_ok=True)
        engine = self._choose_engine()
        write_json(work / PLAN_FILE, asdict(self._options.plan))
        self._report(self._plan_text())
        if (file := work / PROGRESS_FILE).is_file():
            self._seconds |= json.loads(file.read_text(encoding="utf-8"))
        held_out, corpus = Corpus(work / "held-out"), Corpus(work / "pages")
        count = self._held_out_pages
        reporter = ProgressReporter(self._report, "generating held-out pages", 0, count * self._held_out_size)
        while len(held_out) < count:
            self._add_page(held_out, 0, self._held_out_size, reporter)
        self._generate(corpus)
        if engine is not None:
            engine.remove()
        fill([target.model])  # an engine has left them in their files, and drafters borrow some
        release_memory()
        trainer = self._trainer(corpus)
        self._train(trainer, held_out)
        students.save_student(trainer.student, options.out, target)
        student = students.load_student(options.out, target)  # the stored weights are rounded
        counts = measure_acceptance(student, held_out, target.lm_head, self._plan.steps)
        rates = rates_of(counts.values())
        self._report(f"{options.out}: {rates_text(rates)}")
        generated = int(students.token_counts(corpus, vocabulary_size(target.model)).sum())
        card = self._card(counts, generated, trainer.step)
        (options.out / "README.md").write_text("\n".join(card), encoding="utf-8")
        for line in advice(rates, options.out, options.plan.target):
            self._report(line)
        if not options.keep:
            finished = work.replace(work.with_name("work.done"))  # a work folder that exists is always complete
            shutil.rmtree(finished, ignore_errors=True)

    @property
    def _pages(self) -> int:
        """The number of pages of training text."""
        return -(-self._plan.tokens // self._plan.page)

    @property
    def _held_out_size(self) -> int:
        """The number of tokens of a held-out page."""
        return max(self._plan.length, self._plan.page // HELD_OUT_SHARE)

    @property
    def _training_has_begun(self) -> bool:
        return (self._options.work / STATE_FILE).is_file()

    def _choose_engine(self) -> PlainEngine | None:
        """Install the engine that generates faster, or that of the plan: resumed text must have the same bits."""
        if self._training_has_begun:
            return None
        known = self._options.plan.engine
        plain = 0.0 if known else self._generator.seconds_of_all(self._plan.page)
        engine = None if known == PLAIN else students.install_engine(self._target.model)
        generator = self._new_generator()
        if engine is not None and not known and generator.seconds_of_all(self._plan.page) > plain:
            engine.remove()
            engine = None
        if engine is not None:
            self._generator = generator
        if not known:
            self._fit_pages()
        plan = replace(self._options.plan, engine=PLAIN if engine is None else INVARIANT, page=self._plan.page)
        self._options = replace(self._options, plan=plan)
        return engine

    def _fit_pages(self) -> None:
        """Make pages smaller as long as the first ones would take longer than --hours leave for the generation."""
        limit = self._plan.hours * 3600 * GENERATION_SHARE
        while limit and self._plan.page // 2 >= self._plan.batch:
            seconds = [self._generator.seconds(self._held_out_size, number) for number in range(self._held_out_pages)]
            if sum(seconds) + self._generator.seconds(self._plan.page, 0) <= limit:
                return
            self._plan = replace(self._plan, page=self._plan.page // 2)

    def _check_budget(self) -> None:
        """Raise UserError if memory or disk do not suffice, with what would."""
        page, free = self._plan.page, free_bytes(str(self._target.model.device))
        if max(self._page_bytes(page), self._training_bytes()) > free:
            batch = self._plan.batch
            most = batch * bisect_right(range(batch, page + 1, batch), free, key=self._page_bytes)
            suffices = most and self._training_bytes() <= free
            fits = f"--page {most}" if suffices else "a smaller --batch and --length"
            raise UserError(f"{self._need_text()} of memory, and {byte_size(free)} are free: choose {fits}.")
        out = self._options.out.absolute()
        disk = shutil.disk_usage(next(folder for folder in (out, *out.parents) if folder.exists())).free
        left = self._pages - len(Corpus(self._options.work / "pages"))
        if (needed := left * page * self._token_bytes) > disk:
            raise UserError(
                f"The text needs {byte_size(needed)} on disk, and {byte_size(disk)} are free: choose fewer --tokens, "
                "or a different disk for --out."
            )

    def _page_bytes(self, tokens: int) -> int:
        """The memory of a page while it is generated: keys and values, hidden states, and logits.

        Most is needed at its end, where keys have spare capacity and hidden states exist twice, or in the passes that
        insert documents, with their intermediate results.
        """
        model, config = self._target.model, self._new_student().config
        keys: float = cache_bytes(model, 1) * model.dtype.itemsize / 4
        end = tokens * (SPARE_KEYS * keys + 2 * self._token_bytes)
        sizes = (layer_count(model) + 1 + OF_PASS) * config.hidden_size + OF_MLP * config.intermediate_size
        passes = tokens * (keys + self._token_bytes) + min(tokens, PASS_TOKENS) * sizes * model.dtype.itemsize
        rows = tokens / max(self._plan.length // max(SHARES), MIN_FREE_TOKENS)
        return int(max(end, passes) + rows * 3 * 4 * vocabulary_size(model))

    def _training_bytes(self) -> int:
        """The memory of a training step: weights, states, and scores of attention."""
        plan, student = self._plan, self._new_student()
        weights = sum(weight.numel() for weight in student.parameters())
        states = OF_STATES[plan.kind] * self._target.lm_head.shape[1]
        scores = OF_SCORES[plan.kind] * student.config.num_attention_heads * plan.length
        return int(4 * (OF_WEIGHTS * weights + plan.batch * self._drafts * (states + scores)))

    @property
    def _drafts(self) -> float:
        """Drafts of a training step for each token of its batch."""
        return self._plan.steps / self._kind.stride

    def _new_student(self) -> Any:
        """A new drafter without memory for its weights."""
        with torch.device("meta"):
            return students.new_head(self._target, self._plan, drafted=self._plan.vocabulary, mask=0)

    def _seconds_left(self) -> tuple[float, float]:
        """The expected time of the generation and of the training, by the time of passes of the target.

        A training step has forward and backward passes for all drafts, logits of the drafter and of the target, and the
        iterations of Muon.
        """
        plan, generator, work = self._plan, self._generator, self._options.work
        held_out, corpus = len(Corpus(work / "held-out")), len(Corpus(work / "pages"))
        generation = sum(
            generator.seconds(self._held_out_size, number) for number in range(held_out, self._held_out_pages)
        ) + sum(generator.seconds(plan.page, number) for number in range(corpus, self._pages))
        weights = self._new_student().named_parameters()
        shapes = [weight.shape for name, weight in weights if not name.startswith(self._kind.tables)]
        drafted = 6 * (sum(map(math.prod, shapes)) + plan.vocabulary * self._target.lm_head.shape[1])
        matrices = [sorted(shape) for shape in shapes if len(shape) == 2]
        muon = MUON_ITERATIONS * sum(4 * few * few * many + 2 * few**3 for few, many in matrices)
        steps = self._pages * (plan.page // plan.batch) * plan.passes
        return generation, steps * (self._drafts * plan.batch * drafted + muon) / self._speed

    def _need_text(self) -> str:
        needed = max(self._page_bytes(self._plan.page), self._training_bytes())
        return f"Besides the target, this needs {byte_size(needed)}"

    def _plan_text(self) -> str:
        """What will be generated, in which number format, and what it takes."""
        plan, model = self._plan, self._target.model
        held_out = f"{count_of(self._held_out_pages, 'held-out page')} of {self._held_out_size:,}"
        generation, training = (timedelta(seconds=round(seconds)) for seconds in self._seconds_left())
        limit = f", in {plan.hours:g} h as far as possible" if plan.hours else ""
        return (
            f"generating {self._pages:,} pages of {plan.page:,} tokens, and {held_out}, in conversations of up to "
            f"{plan.length:,} tokens. Then {plan.passes} passes of training. All in "
            f"{str(model.dtype).removeprefix('torch.')} on {model.device}. {self._need_text()} of memory, "
            f"{byte_size(self._pages * plan.page * self._token_bytes)} of disk, and roughly {generation} of generation "
            f"and {training} of training{limit}."
        )

    def _add_page(self, corpus: Corpus, first_seed: int, size: int, reporter: ProgressReporter) -> None:
        # Neighbouring seeds of the plan must not share pages.
        seed, started = self._plan.seed * 100_000 + first_seed + len(corpus), time.monotonic()
        corpus.add(self._generator.generate(seed, size, corpus, on_tokens=reporter.advance))
        self._seconds["writing"] += time.monotonic() - started
        write_json(self._options.work / PROGRESS_FILE, self._seconds)

    def _generate(self, corpus: Corpus) -> None:
        if self._training_has_begun:
            return  # more text, which --hours may allow now, would change the drafter's vocabulary
        limit = self._plan.hours * 3600 * GENERATION_SHARE or math.inf  # 0 hours means no limit
        page = self._plan.page
        reporter = ProgressReporter(self._report, "generating", len(corpus) * page, self._pages * page)
        # At least one page, however short the time: training needs text.
        while len(corpus) < self._pages and (self._seconds["writing"] < limit or not len(corpus)):
            self._add_page(corpus, FIRST_TRAINING_SEED, page, reporter)

    def _trainer(self, corpus: Corpus) -> Trainer:
        student = students.create_student(self._target, corpus, self._plan)
        trainer = Trainer(student, corpus, self._target.lm_head, self._plan)
        with suppress(FileNotFoundError, SafetensorError):  # none yet, or an unreadable one: training begins anew
            trainer.load(self._options.work)
            self._report(f"resuming at step {trainer.step} of {trainer.total}")
        return trainer

    def _train(self, trainer: Trainer, held_out: Corpus) -> None:
        step_tokens = self._plan.batch
        earlier = self._seconds["training"]
        saved = started = evaluation = time.monotonic()
        reporter = ProgressReporter(self._report, "training", trainer.step * step_tokens, trainer.total * step_tokens)
        try:
            while trainer.step < trainer.total:
                trainer.train_step()
                now = time.monotonic()
                self._seconds["training"] = earlier + now - started
                # Early, because the learning rate follows a cosine over the total number of steps.
                if self._plan.hours and trainer.step == TIMED_STEPS:
                    self._shorten(trainer)
                    reporter.total = trainer.total * step_tokens
                if now - saved > CHECKPOINT_SECONDS:
                    self._save_checkpoint(trainer)
                    saved = time.monotonic()
                    if saved >= evaluation:
                        self._evaluate(trainer, held_out)
                        evaluation = saved + (1 + EVALUATION_PAUSE) * (time.monotonic() - saved)
                reporter.advance(step_tokens, f", loss {trainer.loss:.2f}")
        finally:
            if trainer.is_consistent:  # otherwise the last checkpoint stays
                self._save_checkpoint(trainer)

    def _evaluate(self, trainer: Trainer, held_out: Corpus) -> None:
        lm_head, steps = self._target.lm_head, self._plan.steps
        counts = measure_acceptance(trainer.student, held_out, lm_head, steps, tokens=EVALUATION_TOKENS)
        self._report(f"step {trainer.step} of {trainer.total}, held out: {rates_text(rates_of(counts.values()))}")

    def _save_checkpoint(self, trainer: Trainer) -> None:
        trainer.save(self._options.work)
        write_json(self._options.work / PROGRESS_FILE, self._seconds)

    def _shorten(self, trainer: Trainer) -> None:
        """Reduce the number of steps to what fits into the remaining time."""
        seconds_left = self._plan.hours * 3600 - sum(self._seconds.values())
        steps_left = int(seconds_left / (self._seconds["training"] / TIMED_STEPS))
        trainer.total = max(TIMED_STEPS, min(trainer.total, TIMED_STEPS + steps_left))

    def _card(self, counts: dict[int, Tensor], generated: int, steps: int) -> list[str]:
        """The lines of the model card. generated: tokens by the target."""
        plan, model = self._options.plan, self._target.model
        hours = {k: v / 3600 for k, v in self._seconds.items()}
        return [
            f"# Drafter for {model.name_or_path}",
            "",
            f"A drafter {self._kind.about}; target.json tells its target apart. It changes the speed of decoding, "
            "never its distribution.",
            "",
            *_acceptance_table(counts),
            "",
            "Measured on held-out conversations. A greedy draft counts if all before it in its round were accepted; at "
            "T = 1 the table has the probability of acceptance.",
            "",
            "## Training",
            "",
            f"- Text: {generated:,} tokens generated by the target in its chat template; answers at temperatures "
            f"{', '.join(map(str, ANSWER_TEMPERATURES))} in turn, to questions "
            + ("from a file." if plan.prompts else "by the target, most with a given beginning or a document."),
            *(["- Training continued from an earlier drafter (`--start`)."] if plan.start else []),
            f"- Training: {steps:,} steps of {plan.batch} tokens in conversations of up to {plan.length}, over "
            f"{plan.steps} drafts, cross entropy to the target's distributions; Muon at {plan.rate}, AdamW at "
            f"{plan.rate_rest} for vectors and embeddings, cosine schedule.",
            f"- Time: {hours['writing']:.2f} h of generation, {hours['training']:.2f} h of training.",
            f"- Machine: {_machine(model)}.",
            "",
            "Settings: `" + json.dumps(public_settings(plan)) + "`\n",
        ]


def _acceptance_table(counts: dict[int, Tensor]) -> list[str]:
    rates = {f"up to {length} tokens": rates_of([part]) for length, part in sorted(counts.items())}
    rates |= {"all": rates_of(counts.values())} if len(counts) > 1 else {}
    steps = next(iter(counts.values())).shape[1]
    return [
        f"| conversations, position of the draft in its round | {' | '.join(str(n + 1) for n in range(steps))} |",
        "|---" * (steps + 1) + "|",
        *(
            f"| {name}, {text} | {' | '.join(map(rate_text, part[kind]))} |"
            for kind, text in (("greedy", "greedy"), ("drawn", "at T = 1"))
            for name, part in rates.items()
        ),
    ]


def _machine(model: Any) -> str:
    is_gpu = model.device.type == "cuda"
    hardware = torch.cuda.get_device_name(model.device) if is_gpu else f"{torch.get_num_threads()} CPU threads"
    return (
        f"{hardware}, {str(model.dtype).removeprefix('torch.')}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}"
    )
