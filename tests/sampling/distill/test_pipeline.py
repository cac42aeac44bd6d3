"""`python -m sampling.distill` on a tiny target: what it writes, interruption and resumption, and refusals."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from distillations import remembered_page
from paths import ROOT
from safetensors.torch import load_file
from shelf import load
from tiny import save_folder, tiny_llama, tiny_mamba, tiny_t5, tiny_tokenizer
from torch.utils.flop_counter import FlopCounterMode

from sampling.distill import pipeline, students, trainer
from sampling.distill.__main__ import main
from sampling.distill.options import Options, TrainingPlan
from sampling.distill.pages import Corpus, PageGenerator
from sampling.distill.students import install_engine
from sampling.distill.trainer import Trainer
from utils.decode.engine_forward import engine_forward
from utils.files import replacing

FLAGS = "--tokens 1000 --page 576 --length 96 --batch 288 --passes 2 --vocabulary 150"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The folder of a tiny target."""
    folder = tmp_path_factory.mktemp("target") / "tiny"
    save_folder(folder, tiny_llama(vocab_size=300), tiny_tokenizer())
    return folder


@pytest.fixture(autouse=True)
def _float32(monkeypatch):
    """The same number format and engine on every machine."""
    monkeypatch.setattr("sampling.distill.students.training_dtype", lambda device: torch.float32)
    monkeypatch.setattr("sampling.distill.students.install_engine", lambda model: None)


def run(target, out, *flags):
    return main(["--target", str(target), "--out", str(out), "--device", "cpu", *FLAGS.split(), *flags])


@pytest.fixture(scope="module")
def finished(target, tmp_path_factory):
    """The folder of a finished run, with its work. Tests change only copies of it."""
    out = tmp_path_factory.mktemp("finished") / "earlier"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sampling.distill.students.training_dtype", lambda device: torch.float32)
        patch.setattr("sampling.distill.students.install_engine", lambda model: None)
        patch.setattr(PageGenerator, "generate", remembered_page)
        assert run(target, out, "--keep") == 0
    return out


@pytest.fixture
def same_text(finished, monkeypatch):
    """Trainings of this test are on the text of the finished run, which is not generated again."""
    monkeypatch.setattr(PageGenerator, "generate", remembered_page)


def weights(out):
    return load_file(Path(out) / "model.safetensors")


def message_of(capsys):
    """What was written to standard error, which must not be a traceback."""
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


def test_a_drafter_is_trained_described_and_loaded(target, finished):
    """Also beside its work, which --keep leaves in its folder."""
    card = (finished / "README.md").read_text()
    assert "| 1 | 2 | 3 |" in card and "up to 96 tokens, greedy" in card and str(target) not in card
    assert (finished / "work").is_dir()
    assert load(target, finished).drafter_kind == "EAGLE-3"


@pytest.fixture
def questions(tmp_path):
    """The flag for a file of questions, so that conversations begin with an answer."""
    (tmp_path / "questions.txt").write_text("What is this?\nAnd that?\n")
    return ["--prompts", str(tmp_path / "questions.txt")]


def test_the_plan_and_the_next_step_are_reported(target, tmp_path, capsys, questions):
    """1,000 tokens are rounded up to two pages. An untrained drafter is useless. Paths are not published."""
    assert run(target, tmp_path / "out", "--rate", "1e-7", *questions) == 0
    messages = message_of(capsys)
    assert "2 pages of 576 tokens, and 1 held-out page of 144, in" in messages and "float32" in messages
    assert f"--target {target} --drafter {tmp_path / 'out'}" in messages and "unlikely to save time" in messages
    assert not (tmp_path / "out" / "work").exists()
    assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("when", ["generation", "training"])
def test_a_resumed_run_gives_the_same_weights(target, finished, tmp_path, monkeypatch, when):
    """Bit for bit the weights of an uninterrupted run, also beside a page that a kill has left half-written."""
    if when == "training":
        monkeypatch.setattr(PageGenerator, "generate", remembered_page)
    owner, method = (Corpus, "add") if when == "generation" else (Trainer, "train_step")
    original, calls, files = getattr(owner, method), [], []

    def interrupted(self, *args):
        original(self, *args)
        calls.append(1)
        if len(calls) == 5:
            if when == "generation":
                files.append(replacing(self._path(len(self))))
                files[0].__enter__().write(b"half")
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupted)
        assert run(target, tmp_path / "parts") == 130
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert main(["--out", str(tmp_path / "parts"), "--resume"]) == 0
    ours, theirs = weights(tmp_path / "parts"), weights(finished)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("of_plain", "of_engine", "expected"), [(2.0, 1.0, "invariant"), (1.0, 2.0, "plain")])
def test_text_is_generated_in_the_faster_engine(target, tmp_path, monkeypatch, of_plain, of_engine, expected):
    """A resumed run keeps the engine whatever is faster then, and training needs none."""
    seconds, computed = {False: of_plain, True: of_engine}, []
    monkeypatch.setattr("sampling.distill.students.install_engine", install_engine)
    monkeypatch.setattr(PageGenerator, "_pass_seconds", lambda self, rows: seconds[has_engine(self._model)])
    original, student = PageGenerator.generate, students.create_student

    def generate(self, *arguments, **options):
        computed.append(has_engine(self._model))
        if len(computed) == 3:
            raise KeyboardInterrupt
        return original(self, *arguments, **options)

    def create_student(own, *arguments):
        computed.append(has_engine(own.model))
        return student(own, *arguments)

    monkeypatch.setattr(PageGenerator, "generate", generate)
    monkeypatch.setattr(students, "create_student", create_student)
    assert run(target, tmp_path, "--keep") == 130
    assert json.loads((tmp_path / "work" / "plan.json").read_text())["engine"] == expected
    seconds.update({False: of_engine, True: of_plain})
    assert main(["--out", str(tmp_path), "--resume", "--keep"]) == 0
    assert computed == [expected == "invariant"] * (len(computed) - 1) + [False]
    assert f'"engine": "{expected}"' in (tmp_path / "README.md").read_text()


def has_engine(model):
    return engine_forward(model) is not None


# A program that kills itself while it writes a file, after it has written so many of this kind.
DYING = """
import os, signal, sys
import torch
from sampling.distill import pages, pipeline, students, trainer
from sampling.distill.__main__ import main
kind, left = sys.argv[1], int(sys.argv[2])
module = {"generation": pages, "training": trainer}[kind]
save = module.save
def dying(*arguments, **options):
    global left
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return save(*arguments, **options)
module.save, pipeline.CHECKPOINT_SECONDS = dying, 0.0
students.training_dtype, students.install_engine = lambda device: torch.float32, lambda model: None
main(sys.argv[3:])
"""


@pytest.mark.parametrize(
    ("kind", "written", "step"),
    [pytest.param("generation", 5, 0, marks=pytest.mark.full), ("training", 3, 3)],
)
def test_a_killed_run_loses_what_it_was_writing(target, finished, tmp_path, capsys, kind, written, step):
    """The page, or the steps since the last checkpoint. The rest gives the weights of an uninterrupted run."""
    flags = ["--target", str(target), "--device", "cpu", *FLAGS.split()]
    if kind == "training":  # on text that was generated before
        shutil.copytree(finished / "work", tmp_path / "work", ignore=shutil.ignore_patterns("trainer*"))
        flags = ["--resume"]
    command = [sys.executable, "-c", DYING, kind, str(written), "--out", str(tmp_path), *flags]
    killed = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    pages = len([*(tmp_path / "work").glob("*/page-*")])
    assert pages == (written if kind == "generation" else 6) and not (tmp_path / "model.safetensors").exists()
    assert main(["--out", str(tmp_path), "--resume", "--keep"]) == 0
    assert (f"resuming at step {step} of" in message_of(capsys)) is (step > 0)
    ours, theirs = weights(tmp_path), weights(finished)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.usefixtures("same_text")
def test_training_reduces_the_loss(target, tmp_path, monkeypatch):
    """Several passes over little text."""
    losses, original = [], trainer.distillation_loss

    def noted(*arguments, **options):
        loss = original(*arguments, **options)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(trainer, "distillation_loss", noted)
    assert run(target, tmp_path, "--passes", "5", "--rate", "0.2") == 0
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--resume"], "--resume"),
        ([], "--target"),
        (["--target", "./nowhere"], "nowhere"),
        (["--target", "TINY", "--device", "cuda:99"], "cuda"),
        (["--target", "TINY", "--prompts", "./nowhere"], "nowhere"),
        (["--target", "TINY", "--prompts", "/dev/null"], "/dev/null"),
    ],
)
def test_options_that_cannot_be_used_are_named(target, tmp_path, capsys, flags, named):
    flags = [str(target) if flag == "TINY" else flag for flag in flags]
    assert main(["--out", str(tmp_path), *flags]) == 1
    assert named in message_of(capsys).lower()


def test_unfinished_work_is_not_overwritten(target, finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    assert run(target, tmp_path) == 1
    message = message_of(capsys)
    assert str(tmp_path) in message and "--resume" in message
    assert main(["--out", str(tmp_path), "--resume", "--target", "other"]) == 1


@pytest.mark.parametrize("names", [("config.json", "model.safetensors"), ("README.md",)])
def test_other_files_are_not_overwritten(target, tmp_path, capsys, names):
    """A folder of a model, perhaps of the target itself, or of something else."""
    for name in names:
        shutil.copy(target / "config.json", tmp_path / name)
    assert run(target, tmp_path) == 1
    assert str(tmp_path) in message_of(capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert all((tmp_path / name).read_bytes() == (target / "config.json").read_bytes() for name in names)


@pytest.mark.parametrize("below", ["", "new"])
def test_a_file_in_place_of_the_folder_is_named_before_the_target_is_loaded(tmp_path, capsys, below):
    file = tmp_path / "drafter"
    file.write_text("notes")
    assert run(tmp_path / "missing", file / below) == 1
    assert str(file) in message_of(capsys) and file.read_text() == "notes"


@pytest.mark.parametrize(("build", "kind"), [(tiny_t5, "encoder-decoder"), (tiny_mamba, "recurrent")])
def test_unsupported_targets_are_refused(tmp_path, capsys, build, kind):
    save_folder(tmp_path / "target", build(vocab_size=300), tiny_tokenizer())
    assert run(tmp_path / "target", tmp_path / "out") == 1
    assert kind in message_of(capsys)


def test_conversations_that_are_too_short_are_refused(target, tmp_path, capsys):
    assert run(target, tmp_path, "--length", "40") == 1
    assert "--length 40" in message_of(capsys)


@pytest.mark.parametrize(("hours", "page"), [("0.3", 576), ("0.2", 288), ("0.01", 144)])
def test_pages_are_no_larger_than_the_time_for_generation_allows(target, tmp_path, monkeypatch, hours, page):
    """With the held-out ones, pages of 576, 288 and 144 tokens take 384, 224 and 176 seconds; 486, 324 and 16 are left
    for them. A page has whole conversations, and no fewer tokens than a training step.
    """
    monkeypatch.setattr("sampling.distill.students.install_engine", lambda model: None)
    monkeypatch.setattr(PageGenerator, "seconds", lambda self, size, number: float(size) / 3)
    assert run(target, tmp_path, "--batch", "96", "--hours", hours, "--keep") == 0
    assert json.loads((tmp_path / "work" / "plan.json").read_text())["page"] == page
    assert {len(load_file(file)["tokens"].flatten()) for file in tmp_path.glob("work/pages/*")} == {page // 96 * 96}


def test_prompts_without_room_for_an_answer_are_refused(target, tmp_path, capsys):
    """The drafter was trained on nothing, and its card had no figures."""
    (tmp_path / "questions.txt").write_text("What? " * 99)
    assert run(target, tmp_path / "out", "--prompts", str(tmp_path / "questions.txt")) == 1
    assert "--length 96 is too short" in message_of(capsys)


@pytest.mark.parametrize("name", ["plan.json", "progress.json", "pages/page-00000.safetensors"])
def test_damaged_work_is_reported(finished, tmp_path, capsys, name):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / "work" / name).write_bytes((tmp_path / "work" / name).read_bytes()[:20])
    assert main(["--out", str(tmp_path), "--resume"]) == 1
    assert message_of(capsys)


def test_an_unreadable_checkpoint_is_made_anew(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    state, right = tmp_path / "work" / "trainer.safetensors", weights(tmp_path)
    state.write_bytes(state.read_bytes()[:20])
    (tmp_path / "model.safetensors").unlink()
    assert main(["--out", str(tmp_path), "--resume"]) == 0
    ours = weights(tmp_path)
    assert all(torch.equal(ours[name], right[name]) for name in right)


@pytest.mark.usefixtures("same_text")
def test_a_step_interrupted_halfway_is_repeated(target, finished, tmp_path, monkeypatch):
    """Only some of the weights have made the step: training resumes from the checkpoint before it."""
    step, calls = torch.optim.AdamW.step, []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 5:  # Muon has made this step already
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", interrupted)
        patch.setattr("sampling.distill.pipeline.CHECKPOINT_SECONDS", 0.0)
        assert run(target, tmp_path / "parts") == 130
    assert main(["--out", str(tmp_path / "parts"), "--resume"]) == 0
    ours, theirs = weights(tmp_path / "parts"), weights(finished)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.usefixtures("same_text")
def test_training_continues_from_an_earlier_drafter(target, finished, tmp_path):
    """At a tiny learning rate the weights stay near those of the earlier drafter, and the card mentions it."""
    flags = ["--rate", "1e-7", "--seed", "1", "--passes", "1"]
    assert run(target, tmp_path / "next", *flags, "--start", str(finished)) == 0
    assert run(target, tmp_path / "fresh", *flags) == 0
    first, continued, fresh = (weights(path) for path in (finished, tmp_path / "next", tmp_path / "fresh"))
    name = next(name for name, part in first.items() if "mlp" in name and part.dim() == 2)
    before, *after = (part[name].float() for part in (first, continued, fresh))
    distances = [float((part - before).norm() / before.norm()) for part in after]
    assert distances[0] < 0.02 < distances[1]
    cards = [(tmp_path / name / "README.md").read_text() for name in ("next", "fresh")]
    assert ["--start" in card for card in cards] == [True, False]


def test_a_start_that_does_not_fit_is_refused(target, finished, tmp_path, capsys):
    """The refusal comes before anything is generated."""
    other = save_folder(tmp_path / "other", tiny_llama(7, vocab_size=300), tiny_tokenizer())
    for model, folder in ((target, tmp_path / "nowhere"), (target, target), (other, finished)):
        assert run(model, tmp_path / "out", "--start", str(folder)) == 1
        assert folder.name in message_of(capsys) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--tokens", "0"],
        ["--hours", "-1"],
        ["--hours", "nan"],
        ["--device", "tpu"],
        ["--length", "4096"],
        ["--batch", "65536"],
    ],
)
def test_invalid_flags_exit_with_status_2(tmp_path, flags):
    with pytest.raises(SystemExit) as exit_info:
        main(["--out", str(tmp_path), "--target", "embedded", *flags])
    assert exit_info.value.code == 2


def test_a_flag_that_is_no_number_is_named_with_what_is_allowed(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--target", "embedded", "--tokens", "abc"])
    assert "--tokens: 'abc' is not a whole number; allowed: at least 1" in message_of(capsys)


@pytest.mark.usefixtures("same_text")
def test_hours_limit_the_training(target, tmp_path):
    assert run(target, tmp_path, "--keep", "--hours", "0.0001", "--passes", "5000") == 0
    assert json.loads((tmp_path / "work" / "progress.json").read_text())["training"] < 10


def test_more_hours_for_a_training_that_has_begun_add_no_text(target, tmp_path, monkeypatch):
    """The trained Markov head belongs to the vocabulary of the text at the beginning."""
    vocabularies, step = [], Trainer.train_step

    def noted(self):
        step(self)
        vocabularies.append(self.student.vocabulary)
        if len(vocabularies) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "train_step", noted)
    assert run(target, tmp_path, "--kind", "block", "--hours", "0.00001", "--vocabulary", "50", "--passes", "5") == 130
    assert len(Corpus(tmp_path / "work" / "pages")) == 1  # of two
    assert main(["--out", str(tmp_path), "--resume", "--hours", "1"]) == 0
    assert len(vocabularies) > 3 and all(torch.equal(vocabularies[0], each) for each in vocabularies)


def test_the_time_is_stated(target, tmp_path, capsys, monkeypatch):
    """A pass takes a second a row: 5 pages of 6 rows and 4 of 1, of 96 positions. A resumed run needs only the rest."""
    monkeypatch.setattr(PageGenerator, "_pass_seconds", lambda self, rows: float(rows))
    original, calls = Corpus.add, []

    def interrupted(self, page):
        original(self, page)
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Corpus, "add", interrupted)
    assert run(target, tmp_path, "--tokens", "2880") == 130
    assert f"roughly {timedelta(seconds=96 * 34)} of generation" in message_of(capsys)
    assert json.loads((tmp_path / "work" / "progress.json").read_text())["writing"] > 0, "held-out pages count"
    monkeypatch.setattr(pipeline.Distillation, "_generate", mock.Mock(side_effect=KeyboardInterrupt))
    assert main(["--out", str(tmp_path), "--resume"]) == 130
    assert f"roughly {timedelta(seconds=96 * 24)} of generation" in message_of(capsys)


@pytest.mark.usefixtures("same_text")
def test_evaluations_take_a_tenth_of_the_time(target, tmp_path, monkeypatch):
    """Each takes longer than all steps together, by a clock that goes on by a second whenever it is read."""
    ticks, waited = count(), []
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=lambda: next(ticks) + sum(waited)))
    monkeypatch.setattr(pipeline, "CHECKPOINT_SECONDS", 0.0)
    slow = mock.Mock(side_effect=lambda *_: waited.append(100))
    monkeypatch.setattr(pipeline.Distillation, "_evaluate", slow)
    saves = mock.Mock(wraps=Trainer.save)
    monkeypatch.setattr(Trainer, "save", lambda self, folder: saves(self, folder))
    assert run(target, tmp_path) == 0
    assert slow.call_count == 1 and saves.call_count == 9, "a checkpoint after each of 8 steps, and at the end"


@pytest.mark.parametrize(("kind", "steps"), [("eagle3", 3), ("block", 5)])
def test_the_time_of_training_is_that_of_its_operations(tmp_path, monkeypatch, kind, steps):
    """Those that torch counts, where layers are wide enough that attention is a small part, and Muon a large one."""
    model = tiny_llama(vocab_size=300, hidden_size=96, intermediate_size=384, num_hidden_layers=8)
    save_folder(tmp_path / "target", model, tiny_tokenizer())
    plan = TrainingPlan(str(tmp_path / "target"), 144, device="cpu", length=72, page=144, batch=72, passes=1)
    plan = replace(plan, vocabulary=150, kind=kind, steps=steps)
    monkeypatch.setattr(PageGenerator, "speed", lambda self, size: 1.0)
    distillation = pipeline.Distillation(Options(plan, tmp_path / "out", resume=False, keep=False), lambda line: None)
    _, expected = distillation._seconds_left()
    corpus = Corpus(tmp_path / "pages")
    corpus.add(distillation._generator.generate(0, plan.page, corpus))
    trainer = distillation._trainer(corpus)
    with FlopCounterMode(display=False) as counter:
        while trainer.step < trainer.total:
            trainer.train_step()
    assert expected == pytest.approx(counter.get_total_flops(), rel=0.2)


def test_what_exceeds_memory_is_refused_with_a_page_that_fits(target, tmp_path, capsys, monkeypatch):
    flags = ["--page", "57600", "--tokens", "288"]
    monkeypatch.setattr(pipeline, "free_bytes", lambda device: 20_000_000)
    assert run(target, tmp_path / "out", *flags) == 1
    (page,) = re.findall(r"choose --page (\d+)\.", message_of(capsys))
    assert 288 <= int(page) < 57600 and not (tmp_path / "out" / "work").exists()
    monkeypatch.setattr(pipeline.Distillation, "_add_page", mock.Mock(side_effect=KeyboardInterrupt))
    assert run(target, tmp_path / "out", *flags, "--page", page) == 130
    monkeypatch.setattr(pipeline, "free_bytes", lambda device: 1_000_000)
    assert run(target, tmp_path / "other", "--page", page) == 1
    assert "a smaller --batch" in message_of(capsys)


def test_what_exceeds_the_disk_is_refused(target, finished, tmp_path, capsys, monkeypatch):
    """Pages that exist are not counted again."""
    needed = 2 * 576 * 2 * 3 * tiny_llama().config.hidden_size  # two pages, two bytes, three hidden states
    monkeypatch.setattr(pipeline.shutil, "disk_usage", lambda path: mock.Mock(free=needed - 1))
    assert run(target, tmp_path / "out") == 1 and "on disk" in message_of(capsys)
    shutil.copytree(finished / "work", tmp_path / "out" / "work")
    assert main(["--out", str(tmp_path / "out"), "--resume"]) == 0
