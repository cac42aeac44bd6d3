"""Block drafters that the command writes: they draft what training computed, and texts stay the target's."""

import json
from pathlib import Path

import pytest
import torch
from distillations import FLAGS, changed, page_of, target_folder, trained
from drafter_runs import check_texts
from paths import ROOT
from safetensors.torch import load_file
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_tokenizer

from sampling.distill.__main__ import main
from sampling.distill.pages import Corpus
from sampling.distill.students import Target, load_student, output_weight, token_counts
from sampling.distill.trainer import Trainer
from sampling.drafters.feature_sessions import feature_session
from utils.drafter_formats.dspark_file import new_dspark
from utils.drafter_formats.eagle3_file import new_eagle3

FIXTURE = ROOT / "tests" / "utils" / "drafter_formats" / "fixtures" / "speculators_blocks" / "dspark"
LAYERS, SLOTS, PASSES = 3, 5, ("--passes", "12", "--rate", "0.1")
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return target_folder(tmp_path_factory.mktemp("target"), layers=LAYERS)


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    """A trained drafter with its work. Tests change only copies of it."""
    return trained(target, tmp_path_factory.mktemp("trained") / "out", "--kind", "block", "--keep", *PASSES)


def test_a_new_drafter_does_not_magnify_its_own_tokens():
    """Its states begin with the embedding, unlike those of the other kind, which begin with features of the target."""
    model = tiny_llama(num_hidden_layers=4)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    block = new_dspark(model, (1, 2), slots=2, drafted=8, mask=0)
    assert block.norm.weight.unique().tolist() == [1.0]
    assert new_eagle3(model, (1, 2)).norm.weight.unique().tolist() == [3.0]


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("entries", [slice(None), slice(1, None, 2)])
@pytest.mark.parametrize(
    ("layer", "keys"),
    [({}, {}), (SLIDING, {}), (SLIDING, {"sliding_window_non_causal": True}), ({}, {"is_causal": True})],
)
def test_drafts_and_confidence_are_what_training_computed(target, folder, tmp_path, monkeypatch, layer, keys, entries):
    """All blocks of a text at once against a session that drafts along it, with few blocks that attend together."""
    monkeypatch.setattr("sampling.distill.blocks.CHUNK", 3)
    layer = config_of(folder)["transformer_layer_config"] | layer
    pair = load(target, changed(folder, tmp_path / "out", transformer_layer_config=layer, **keys))
    assert pair.drafter_kind == "DSpark" and pair.drafter.block_size == SLOTS
    page = page_of(pair.target, pair.drafter.feature_layers)
    student = load_student(tmp_path / "out", Target(pair.target, None, output_weight(pair.target)))
    with torch.no_grad():
        states = torch.stack([part[0] for part in student.predictions(page, SLOTS, entries)])
        logits = states @ torch.cat([student.rows, student.extra], dim=1).T
        confidence = student.confidence(states).sigmoid()
    session, tokens, known = feature_session(pair.drafter), page.tokens[0].tolist(), 0
    session.begin(tokens[:1])
    ends = range(1, len(tokens) - SLOTS)[entries]
    assert len(ends) == logits.shape[1] and logits.std() > 0.1
    for row, end in enumerate(ends):
        session.rewind(end)
        session.add_features(page.features[0, known:end, :-32], known, end)
        known = end
        for step in range(SLOTS):
            drafted = session.feed(tokens[: end + 1 + step], keep=1)[0]
            assert torch.allclose(drafted[student.vocabulary], logits[step, row], atol=1e-5, rtol=1e-5), (end, step)
            own = session.confidence(tokens[: end + 1 + step])
            assert own == pytest.approx(float(confidence[step, row]), abs=1e-5)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_texts_are_the_targets(target, folder, rule):
    """Greedy or with shared noise, where some drafts are accepted and some are not."""
    pair = load(target, folder)
    check_texts(pair.target, pair.drafter, rule)


def test_config_and_tensors_are_those_of_the_package(folder):
    """Beside a drafter that speculators 0.9.0 saved. The mask token is one that the target never generated."""
    stored, config = config_of(FIXTURE), config_of(folder)
    assert config.keys() == stored.keys() - {"auto_map"}
    assert config["speculators_config"].keys() == stored["speculators_config"].keys()
    different = {name for name in stored if config.get(name) != stored[name]}
    assert different == {
        "auto_map",
        "aux_hidden_state_layer_ids",
        "block_size",
        "draft_vocab_size",
        "dtype",
        "markov_rank",
        "mask_token_id",
        "speculators_config",
        "transformer_layer_config",
    }
    ours, theirs = (load_file(one / "model.safetensors") for one in (folder, FIXTURE))
    assert ours.keys() == theirs.keys() | {"embed_tokens.weight"}
    assert all(ours[name].ndim == part.ndim for name, part in theirs.items())
    counts = token_counts(Corpus(folder / "work" / "pages"), 300)
    assert config["block_size"] == SLOTS and counts.sum() and not counts[config["mask_token_id"]]
    card = (folder / "README.md").read_text()
    assert "DSpark" in card and "| 1 | 2 | 3 | 4 | 5 |" in card


def test_a_resumed_training_gives_the_same_weights(target, folder, tmp_path, monkeypatch):
    original, steps = Trainer.train_step, []

    def interrupted(self):
        original(self)
        steps.append(self.step)
        if len(steps) == 7:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", interrupted)
        with pytest.raises(AssertionError):  # its status is that of an interruption
            trained(target, tmp_path / "out", "--kind", "block", *PASSES)
    with monkeypatch.context() as patch:
        patch.setattr("sampling.distill.students.training_dtype", lambda device: torch.float32)
        assert main(["--out", str(tmp_path / "out"), "--resume"]) == 0
    ours, theirs = (load_file(one / "model.safetensors") for one in (tmp_path / "out", folder))
    assert steps[-1] == 7 and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_drafter_is_continued_with_other_blocks(target, folder, tmp_path):
    """It keeps its vocabulary, its mask token and its layers. Embedding and rows are not trained."""
    layer = config_of(folder)["transformer_layer_config"] | SLIDING
    start = changed(folder, tmp_path / "start", transformer_layer_config=layer)
    out = trained(target, tmp_path / "out", "--kind", "block", "--start", str(start), "--steps", "3")
    before, after = (load(target, one).drafter for one in (start, out))
    assert (after.block_size, after.mask_token, after.windows) == (3, before.mask_token, before.windows)
    assert after.windows[0].size == 3 and torch.equal(before.lm_head.vocabulary, after.lm_head.vocabulary)
    first, last = (load_file(one / "model.safetensors") for one in (start, out))
    kept = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    moved = ("fc.weight", "layers.1.mlp.down_proj.weight", "markov_head.markov_w2.weight")
    assert [torch.equal(first[name], last[name]) for name in kept + moved] == [True] * 4 + [False] * 3


def test_drafters_that_cannot_be_continued_are_refused(target, folder, tmp_path, capsys):
    """Of the other kind, of a layout that is not trained, or of a different target."""
    stepwise = trained(target, tmp_path / "stepwise", "--passes", "1")
    unanchored = changed(folder, tmp_path / "unanchored", sample_from_anchor=False)
    save_folder(tmp_path / "other", tiny_llama(7, vocab_size=300, num_hidden_layers=LAYERS), tiny_tokenizer())
    for model, kind, start, named in (
        (target, "block", stepwise, "--kind eagle3"),
        (target, "eagle3", folder, "--kind block"),
        (target, "block", unanchored, "does not train"),
        (tmp_path / "other", "block", folder, "was trained for tiny"),
    ):
        capsys.readouterr()
        flags = ["--target", str(model), "--kind", kind, "--start", str(start), *FLAGS.split()]
        assert main([*flags, "--out", str(tmp_path / "out")]) == 1
        message = capsys.readouterr().err
        assert named in message and "Traceback" not in message and not (tmp_path / "out").exists()
    assert "was trained for tiny" in refusal(tmp_path / "other", folder)


def test_an_unknown_kind_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--target", "embedded", "--out", str(tmp_path), "--kind", "tree"])
    assert caught.value.code == 2 and "eagle3" in capsys.readouterr().err
