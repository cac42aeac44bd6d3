"""`python -m sampling.distill` on a tiny target: what it writes, interruption and resumption, and refusals."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shelf import load
from tiny import save_folder, tiny_llama, tiny_mamba, tiny_t5, tiny_tokenizer

from sampling.distill.__main__ import main
from sampling.distill.options import KINDS
from sampling.distill.pages import Corpus
from sampling.distill.trainer import Trainer

FLAGS = "--tokens 1000 --rows 6 --length 96 --batch 3 --passes 2 --vocabulary 150"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The folder of a tiny target."""
    folder = tmp_path_factory.mktemp("target") / "tiny"
    save_folder(folder, tiny_llama(vocab_size=300), tiny_tokenizer())
    return folder


@pytest.fixture(autouse=True)
def _float32(monkeypatch):
    """The same number format on every machine."""
    monkeypatch.setattr("sampling.distill.students.training_dtype", lambda device: torch.float32)


def run(target, out, *flags):
    return main(["--target", str(target), "--out", str(out), "--device", "cpu", *FLAGS.split(), *flags])


@pytest.fixture(scope="module")
def finished(target, tmp_path_factory):
    """The folder of a finished run, with its work, by kind. Tests change only copies of it."""
    root = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sampling.distill.students.training_dtype", lambda device: torch.float32)
        for kind in KINDS:
            assert run(target, root / kind, "--kind", kind, "--keep") == 0
    return root


def weights(out):
    return load_file(Path(out) / "model.safetensors")


def message_of(capsys):
    """What was written to standard error, which must not be a traceback."""
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_trained_described_and_loaded(target, finished, kind):
    """Also beside its work, which --keep leaves in its folder."""
    card = (finished / kind / "README.md").read_text()
    assert "| 1 | 2 | 3 |" in card and "--target TARGET" in card and str(target) not in card
    assert (finished / kind / "work").is_dir()
    assert load(target, finished / kind).drafter_kind == {"eagle3": "EAGLE-3"}.get(kind, kind)


def acceptance(messages, out):
    """The acceptance of a finished or measured drafter."""
    return next(line for line in messages.splitlines() if line.startswith(f"{out}: ")).partition(": ")[2]


@pytest.fixture
def questions(tmp_path):
    """The flag for a file of questions, so that conversations begin with an answer."""
    (tmp_path / "questions.txt").write_text("What is this?\nAnd that?\n")
    return ["--prompts", str(tmp_path / "questions.txt")]


def test_the_figures_of_the_card_can_be_repeated_without_its_flags(target, tmp_path, capsys, questions):
    """Also after the work folder is gone. Only paths must be named again."""
    out = tmp_path / "out"
    assert run(target, out, *questions, "--seed", "3") == 0
    first = acceptance(capsys.readouterr().err, out)
    measure = ["--out", str(out), "--device", "cpu", "--measure", "--target", str(target)]
    assert main([*measure, *questions]) == 0
    assert acceptance(capsys.readouterr().err, out) == first and any(digit in first for digit in "23456789")
    assert main([*measure, *questions, "--seed", "4"]) == 0
    assert acceptance(capsys.readouterr().err, out) != first, "a flag wins over the stored setting"
    assert str(tmp_path) not in (tmp_path / "out" / "training.json").read_text()
    (tmp_path / "out" / "training.json").write_text('{"rows": ')
    assert main(measure) == 1 and "training.json" in message_of(capsys)


@pytest.mark.parametrize("flags", [["--start", "nowhere"], ["--resume"]])
def test_flags_without_effect_on_a_measurement_are_refused(target, finished, capsys, flags):
    with pytest.raises(SystemExit) as exit_info:
        main(["--out", str(finished / "eagle3"), "--target", str(target), "--measure", *flags])
    assert exit_info.value.code == 2 and flags[0] in message_of(capsys)


def test_a_folder_without_a_drafter_cannot_be_measured(target, tmp_path, capsys):
    for folder in (tmp_path / "missing", tmp_path):
        assert main(["--out", str(folder), "--target", str(target), "--measure"]) == 1
        message = message_of(capsys)
        assert "no drafter" in message and str(folder) in message and "hub" not in message


def test_the_plan_and_the_next_step_are_reported(target, tmp_path, capsys, questions):
    """1,000 tokens are rounded up to two pages of 6 x 96. An untrained drafter is useless."""
    assert run(target, tmp_path / "out", "--rate", "1e-7", *questions) == 0
    messages = message_of(capsys)
    assert "1,152 in all" in messages and "1,000" in messages and "float32" in messages
    assert f"--target {target} --drafter {tmp_path / 'out'}" in messages and "unlikely to save time" in messages
    assert messages.count("held out: ") <= 1, "one line for each of 20 evaluations says little"
    assert not (tmp_path / "out" / "work").exists()


def test_a_held_out_page_without_answers_is_explained(target, tmp_path, capsys):
    """Two rows are both greedy."""
    assert run(target, tmp_path / "out", "--rows", "2", "--batch", "2") == 0
    assert "- - -" in acceptance(messages := message_of(capsys), tmp_path / "out") and "no such answers" in messages
    assert "no such answers" in (tmp_path / "out" / "README.md").read_text()


# Texts are generated in the same way for every kind.
@pytest.mark.parametrize(
    ("when", "kind"),
    [("generation", "eagle3"), *(("training", kind) for kind in KINDS)]
    + [pytest.param("generation", kind, marks=pytest.mark.full) for kind in KINDS if kind != "eagle3"],
)
def test_a_resumed_run_gives_the_same_weights(target, finished, tmp_path, monkeypatch, kind, when):
    """Bit for bit the weights of an uninterrupted run."""
    owner, method, last = (Corpus, "add", 2) if when == "generation" else (Trainer, "train_step", 5)
    original, calls = getattr(owner, method), []

    def interrupted(self, *args):
        original(self, *args)
        calls.append(1)
        if len(calls) == last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupted)
        assert run(target, tmp_path / "parts", "--kind", kind) == 130
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert main(["--out", str(tmp_path / "parts"), "--resume"]) == 0
    ours, theirs = weights(tmp_path / "parts"), weights(finished / kind)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", KINDS)
def test_training_reduces_the_loss(target, tmp_path, kind):
    """Many passes over little text."""
    assert run(target, tmp_path, "--keep", "--passes", "15", "--rate", "0.05", "--kind", kind) == 0
    curve = json.loads((tmp_path / "work" / "progress.json").read_text())["curve"]
    assert curve[-1]["loss"] < 0.9 * curve[0]["loss"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--resume"], "--resume"),
        ([], "--target"),
        (["--target", "./nowhere"], "nowhere"),
        (["--target", "TINY", "--device", "cuda:99"], "cuda"),
        (["--target", "TINY", "--prompts", "./nowhere"], "nowhere"),
        (["--target", "TINY", "--kind", "eagle3", "--layers", "2,31"], "31"),
        (["--target", "TINY", "--prompts", "/dev/null"], "/dev/null"),
    ],
)
def test_options_that_cannot_be_used_are_named(target, tmp_path, capsys, flags, named):
    flags = [str(target) if flag == "TINY" else flag for flag in flags]
    assert main(["--out", str(tmp_path), *flags]) == 1
    assert named in message_of(capsys).lower()


def test_unfinished_work_is_not_overwritten(target, finished, tmp_path, capsys):
    shutil.copytree(finished / "eagle3", tmp_path, dirs_exist_ok=True)
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


@pytest.mark.parametrize("name", ["plan.json", "progress.json", "trainer.safetensors", "pages/page-00000.safetensors"])
def test_damaged_work_is_reported(finished, tmp_path, capsys, name):
    shutil.copytree(finished / "eagle3", tmp_path, dirs_exist_ok=True)
    (tmp_path / "work" / name).write_bytes((tmp_path / "work" / name).read_bytes()[:20])
    assert main(["--out", str(tmp_path), "--resume"]) == 1
    assert message_of(capsys)


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
    ours, theirs = weights(tmp_path / "parts"), weights(finished / "eagle3")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_training_continues_from_an_earlier_drafter(target, finished, tmp_path, kind):
    """At a tiny learning rate the weights stay near those of the earlier drafter, and the card mentions it."""
    flags = ["--kind", kind, "--rate", "1e-7", "--seed", "1", "--passes", "1"]
    assert run(target, tmp_path / "next", *flags, "--start", str(finished / kind)) == 0
    assert run(target, tmp_path / "fresh", *flags) == 0
    first, continued, fresh = (weights(path) for path in (finished / kind, tmp_path / "next", tmp_path / "fresh"))
    name = next(name for name, part in first.items() if "mlp" in name and part.dim() == 2)
    before, *after = (part[name].float() for part in (first, continued, fresh))
    distances = [float((part - before).norm() / before.norm()) for part in after]
    assert distances[0] < 0.02 < distances[1]
    cards = [(tmp_path / name / "README.md").read_text() for name in ("next", "fresh")]
    assert ["--start" in card for card in cards] == [True, False]


def test_a_start_that_does_not_fit_is_refused(target, finished, tmp_path, capsys):
    """The refusal comes before anything is generated."""
    save_folder(tmp_path / "other", tiny_llama(7, vocab_size=300), tiny_tokenizer())
    assert run(tmp_path / "other", tmp_path / "head") == 0
    capsys.readouterr()
    for folder in (tmp_path / "nowhere", target, tmp_path / "head"):
        assert run(target, tmp_path / "out", "--start", str(folder)) == 1
        assert folder.name in message_of(capsys) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--tokens", "0"],
        ["--hours", "-1"],
        ["--hours", "nan"],
        ["--kind", "tree"],
        ["--device", "tpu"],
        ["--kind", "eagle3", "--layers", "2,1"],
        ["--kind", "eagle3", "--layers", "1,2", "--start", "."],
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


def test_hours_limit_the_training(target, tmp_path):
    assert run(target, tmp_path, "--keep", "--hours", "0.0002", "--passes", "5000") == 0
    assert json.loads((tmp_path / "work" / "progress.json").read_text())["training"] < 10
