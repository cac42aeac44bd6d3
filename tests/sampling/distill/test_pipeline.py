"""`python -m sampling.distill` on a tiny target: what it writes, learns, keeps and goes on from."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shelf import load
from tiny import save_folder, tiny_llama, tiny_mamba, tiny_t5, tiny_tokenizer

from sampling.distill.__main__ import main
from sampling.distill.dataset import Corpus
from sampling.distill.trainer import Trainer

FLAGS = "--tokens 1000 --rows 6 --length 96 --batch 3 --passes 2 --vocabulary 150 --width 64 --depth 1"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny target in a folder, in float32 on every machine."""
    folder = tmp_path_factory.mktemp("target") / "tiny"
    save_folder(folder, tiny_llama(vocab_size=300), tiny_tokenizer())
    return folder


@pytest.fixture(autouse=True)
def _float32(monkeypatch):
    monkeypatch.setattr("sampling.distill.pipeline.number_format", lambda device: torch.float32)


def make(target, out, *flags):
    return main(["--target", str(target), "--out", str(out), "--device", "cpu", *FLAGS.split(), *flags])


def weights(out):
    return load_file(Path(out) / "model.safetensors")


@pytest.mark.parametrize("kind", ["head", "lm"])
def test_a_drafter_is_made_described_and_loaded(target, tmp_path, kind, capsys):
    assert make(target, tmp_path / "made", "--kind", kind) == 0
    card = (tmp_path / "made" / "README.md").read_text()
    assert (
        "draft's place in its round | 1 | 2 | 3" in card
        and "tokens that the target chose" in card
        and "--target TARGET" in card
        and str(target) not in card
    )
    assert not (tmp_path / "made" / "work").exists()
    pair = load(target, tmp_path / "made")
    assert pair.drafter_kind == ("head" if kind == "head" else "model")
    said = capsys.readouterr().err
    assert "greedy acceptance" in said


def test_the_cards_figures_can_be_had_again(target, tmp_path, capsys):
    assert make(target, tmp_path, "--keep") == 0
    first = capsys.readouterr().err.splitlines()[-1]
    assert make(target, tmp_path, "--measure") == 0
    again = capsys.readouterr().err.splitlines()[-1]
    assert first == again and "greedy acceptance" in again


@pytest.mark.parametrize("kind", ["head", "lm"])
@pytest.mark.parametrize("when", ["writing", "training"])
def test_what_was_interrupted_goes_on_exactly(target, tmp_path, monkeypatch, kind, when):
    """The same weights, to the bit, as the run that nobody interrupted."""
    assert make(target, tmp_path / "whole", "--kind", kind) == 0
    where, method, after = (Corpus, "add", 1) if when == "writing" else (Trainer, "train", 5)
    whole, count = getattr(where, method), []

    def interrupted(self, *args):
        whole(self, *args)
        count.append(1)
        if len(count) == after + (when == "writing"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(where, method, interrupted)
        assert make(target, tmp_path / "parts", "--kind", kind) == 130
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert main(["--out", str(tmp_path / "parts"), "--resume"]) == 0
    ours, theirs = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_learning_helps(target, tmp_path):
    """Many looks at little text: the loss of what was learnt falls."""
    assert make(target, tmp_path, "--keep", "--passes", "30", "--rate", "0.05") == 0
    curve = json.loads((tmp_path / "work" / "progress.json").read_text())["curve"]
    assert curve[-1]["loss"] < 0.9 * curve[0]["loss"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--resume"], "nothing to resume"),
        ([], "--target is missing"),
        (["--target", "./nowhere"], "does not exist"),
        (["--target", "embedded", "--device", "cuda:99"], "CUDA"),
        (["--target", "embedded", "--prompts", "./nowhere"], "cannot be read"),
        (["--target", "embedded", "--prompts", "/dev/null"], "holds no prompt"),
    ],
)
def test_orders_that_cannot_be_carried_out(tmp_path, capsys, flags, words):
    assert main(["--out", str(tmp_path), *flags]) == 1
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said


def test_unfinished_work_is_not_overwritten(target, tmp_path, capsys):
    assert make(target, tmp_path, "--keep") == 0
    assert make(target, tmp_path) == 1
    assert "unfinished work" in capsys.readouterr().err
    assert main(["--out", str(tmp_path), "--resume", "--target", "other"]) == 1


@pytest.mark.parametrize(("build", "words"), [(tiny_t5, "encoder-decoder"), (tiny_mamba, "recurrent")])
def test_targets_that_no_drafter_can_be_made_for(tmp_path, capsys, build, words):
    save_folder(tmp_path / "target", build(vocab_size=300), tiny_tokenizer())
    assert make(tmp_path / "target", tmp_path / "out") == 1
    assert words in capsys.readouterr().err


def test_conversations_too_short_to_hold_any(target, tmp_path, capsys):
    assert make(target, tmp_path, "--length", "40") == 1
    assert "--length must be at least" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plan.json", "progress.json", "trainer.safetensors", "pages/page-00000.safetensors"])
def test_damaged_work_is_a_sentence(target, tmp_path, capsys, name):
    assert make(target, tmp_path, "--keep") == 0
    (tmp_path / "work" / name).write_bytes((tmp_path / "work" / name).read_bytes()[:20])
    assert main(["--out", str(tmp_path), "--resume"]) == 1
    said = capsys.readouterr().err
    assert "damaged" in said and "Traceback" not in said


def test_a_step_that_was_interrupted_in_the_middle_is_done_again(target, tmp_path, monkeypatch):
    """Half of the weights stepped, half not: the checkpoint before it is gone on from, and the end is the same."""
    assert make(target, tmp_path / "whole") == 0
    step, calls = torch.optim.AdamW.step, []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 5:  # Muon's half of the step is done
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", interrupted)
        patch.setattr("sampling.distill.pipeline.CHECKPOINT_SECONDS", 0.0)
        assert make(target, tmp_path / "parts") == 130
    assert main(["--out", str(tmp_path / "parts"), "--resume"]) == 0
    ours, theirs = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", ["head", "lm"])
def test_a_drafter_learns_on_from_another(target, tmp_path, kind):
    """It begins with what the other knows: at a tiny rate, weights stay near; and the card says so."""
    assert make(target, tmp_path / "first", "--kind", kind) == 0
    flags = ["--kind", kind, "--rate", "1e-7", "--seed", "1"]
    assert make(target, tmp_path / "next", *flags, "--start", str(tmp_path / "first")) == 0
    assert make(target, tmp_path / "fresh", *flags) == 0
    first, near, far = (weights(tmp_path / name) for name in ("first", "next", "fresh"))
    name = next(name for name, part in first.items() if "mlp" in name and part.dim() == 2)
    apart = [
        float((part[name].float() - first[name].float()).norm() / first[name].float().norm()) for part in (near, far)
    ]
    assert apart[0] < 0.02 < apart[1]
    assert "a drafter made before" in (tmp_path / "next" / "README.md").read_text()


def test_drafters_that_cannot_be_gone_on_from(target, tmp_path, capsys):
    """Said before anything is written."""
    assert make(target, tmp_path / "lm", "--kind", "lm") == 0
    save_folder(tmp_path / "other", tiny_llama(7, vocab_size=300), tiny_tokenizer())
    assert make(tmp_path / "other", tmp_path / "head") == 0
    capsys.readouterr()
    for folder, words in (
        ("nowhere", "does not exist"),
        ("lm", "add --kind lm"),
        ("head", "the target is another model"),
    ):
        assert make(target, tmp_path / "out", "--start", str(tmp_path / folder)) == 1
        said = capsys.readouterr().err
        assert words in said and "Traceback" not in said and not (tmp_path / "out").exists()


def test_another_kind_in_the_same_folder_leaves_no_trace(target, tmp_path):
    assert make(target, tmp_path) == 0 and make(target, tmp_path, "--kind", "lm") == 0
    assert load(target, tmp_path).drafter_kind == "model"
    assert make(target, tmp_path) == 0
    assert load(target, tmp_path).drafter_kind == "head"


@pytest.mark.parametrize(
    "flags",
    [
        ["--tokens", "0"],
        ["--tokens", "x"],
        ["--hours", "-1"],
        ["--hours", "nan"],
        ["--kind", "tree"],
        ["--device", "tpu"],
    ],
)
def test_flags_that_mean_nothing(tmp_path, flags):
    with pytest.raises(SystemExit) as left:
        main(["--out", str(tmp_path), "--target", "embedded", *flags])
    assert left.value.code == 2


def test_hours_shorten_the_training(target, tmp_path, capsys):
    assert make(target, tmp_path, "--keep", "--hours", "0.0005", "--passes", "5000") == 0
    assert json.loads((tmp_path / "work" / "progress.json").read_text())["training"] < 10
