"""Drafters that the command writes: they draft what training computed, and the package speculators reads them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distillations import LAYERS, changed, page_of, target_folder, trained
from drafter_checkpoints import HEADS, HIDDEN, VOCABULARY, eagle3_tensors, layer_keys, write_checkpoint
from drafter_runs import loaded
from paths import ROOT
from safetensors.torch import load_file, save_file
from shelf import load, refusal
from tiny import DECODER, build, save_folder, tiny_llama, tiny_tokenizer
from transformers import AutoConfig, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig

from sampling.distill.options import TrainingPlan
from sampling.distill.pages import Corpus
from sampling.distill.students import Target, create_student, load_student, output_weight
from sampling.drafters.feature_sessions import feature_session
from utils.drafter_formats.eagle3 import LAYER_IDS
from utils.drafter_formats.eagle3_file import Surroundings, can_be_stored, save_eagle3, usual_layers
from utils.drafter_formats.layer_config import LAYER_KEYS
from utils.drafter_formats.target_parts import write_target_file
from utils.engine.invariant import CompiledBuilder
from utils.engine.layer_engine import unreported
from utils.engine.module_swap import EngineLinear, swap_linears
from utils.engine.weight_format import EngineWeights

FIXTURES = ROOT / "tests" / "utils" / "drafter_formats" / "fixtures" / "speculators"
PACKAGES = (["loguru", "pydantic-settings"], ["--no-deps", "speculators==0.9.0"])
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 4}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return target_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def folders(target, tmp_path_factory):
    """Folders of trained drafters, by the layers that they read. The last one is read before the final norm."""
    root = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sampling.distill.students.usual_layers", lambda count: (0, 3, LAYERS + 1))
        last = trained(target, root / "last")
    return {"usual": trained(target, root / "usual"), "last": last}


KEYS = [{}, {"norm_output": True}, {"norm_before_residual": True}, WINDOW]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        pytest.param(name, keys, marks=() if index % 2 == row else pytest.mark.full)
        for row, name in enumerate(("last", "usual"))
        for index, keys in enumerate(KEYS)
    ],
)
def test_drafts_are_what_training_computed(target, folders, tmp_path, name, keys):
    """The unrolled steps of training against a session that drafts along the same text, after every position."""
    layer = json.loads((folders[name] / "config.json").read_text())["transformer_layer_config"]
    keys = {"transformer_layer_config": layer | keys} if keys == WINDOW else keys
    pair = load(target, changed(folders[name], tmp_path / "out", **keys))
    page = page_of(pair.target, pair.drafter.feature_layers)
    with torch.no_grad():
        student = load_student(tmp_path / "out", Target(pair.target, None, output_weight(pair.target)))
        steps = [states[0] @ student.rows.T for states in student.predictions(page, 3)]
    assert student.layers == (*pair.drafter.feature_layers, -1) and steps[0].std() > 0.1
    session, tokens, known = feature_session(pair.drafter), page.tokens[0].tolist(), 0
    session.begin(tokens[:1])
    for end in range(1, len(steps[0]) + 1):
        session.rewind(end)
        session.add_features(page.features[0, known:end, : -page.features.shape[-1] // 4], known, end)
        known = end
        for step, logits in enumerate(steps):
            drafted = session.feed(tokens[: end + 1 + step], keep=1)[0]
            assert torch.allclose(drafted[student.vocabulary], logits[end - 1], atol=1e-4), (end, step)
            assert int(drafted.isneginf().sum()) == 300 - 150


def test_the_layers_are_numbered_as_in_the_layout(folders):
    """Number n is the last layer's output before the final norm, and never that after it."""
    configs = {name: json.loads((folder / "config.json").read_text()) for name, folder in folders.items()}
    ids = {name: config["eagle_aux_hidden_state_layer_ids"] for name, config in configs.items()}
    assert ids == {"usual": [2, 4, 5], "last": [0, 3, 8]}
    assert usual_layers(30) == (2, 15, 27) and usual_layers(36) == (2, 18, 33)
    for count in range(1, 12):
        layers = usual_layers(count)
        assert list(layers) == sorted(set(layers)) and layers[0] >= 0 and layers[-1] < count


def test_config_and_tensors_are_those_of_the_package(folders):
    """Beside a drafter that speculators 0.9.0 saved."""
    stored = json.loads((FIXTURES / "llama-fc-norm" / "config.json").read_text())
    config = json.loads((folders["usual"] / "config.json").read_text())
    layer = config["transformer_layer_config"]
    assert config.keys() - layer.keys() - {"eagle_config"} == stored.keys() - {"auto_map", *layer}
    assert config["speculators_config"].keys() == stored["speculators_config"].keys()
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    same = ("speculators_model_type", "speculators_version", "fc_norm", "norm_output")
    assert [config[name] for name in same] == [stored[name] for name in same]
    ours, theirs = (
        load_file(folder / "model.safetensors") for folder in (folders["usual"], FIXTURES / "llama-fc-norm")
    )
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == theirs[name].dtype for name in ("d2t", "t2d"))
    ids = ours["d2t"] + torch.arange(150)
    assert torch.equal(ours["t2d"].nonzero()[:, 0], ids) and config["draft_vocab_size"] == 150


def test_sglang_reads_the_same_drafter(target, folders, tmp_path):
    """SGLang 0.5.23 knows `LlamaForCausalLMEagle3`, and only keys at the top of a config that transformers can read."""
    config = AutoConfig.from_pretrained(folders["usual"])
    assert isinstance(config, LlamaConfig) and config.architectures == ["LlamaForCausalLMEagle3"]
    assert (config.num_hidden_layers, config.target_hidden_size, config.draft_vocab_size) == (1, 32, 150)
    assert config.eagle_config[LAYER_IDS] == [1, 3, 4]  # outputs of layers
    alone = changed(folders["usual"], tmp_path / "alone")
    keys = json.loads((alone / "config.json").read_text())
    keys = {key: value for key, value in keys.items() if "speculators" not in key and key != LAYER_IDS}
    keys.pop("transformer_layer_config")
    (alone / "config.json").write_text(json.dumps(keys))
    nested, flat = (load(target, one).drafter for one in (folders["usual"], alone))
    assert nested.conventions == flat.conventions
    nested_keys, flat_keys = (drafter.config.to_dict() for drafter in (nested, flat))
    assert [nested_keys.get(key) for key in LAYER_KEYS] == [flat_keys.get(key) for key in LAYER_KEYS]


def test_drafters_that_sglang_would_misread_have_no_keys_for_it(target, folders, tmp_path):
    """It would number other layers differently, and has no `norm_before_residual`."""
    start = changed(folders["usual"], tmp_path / "start", norm_before_residual=True)
    for folder in (folders["last"], trained(target, tmp_path / "out", "--start", str(start))):
        assert not {"model_type", "eagle_config"} & json.loads((folder / "config.json").read_text()).keys()


@pytest.mark.parametrize(("layers", "head_norms", "known"), [(1, False, True), (2, False, False), (1, True, False)])
def test_sglang_gets_only_layers_that_it_computes(tmp_path, layers, head_norms, known):
    """A published drafter that is continued may have several layers, or those of Qwen3."""
    model = tiny_llama(vocab_size=VOCABULARY, hidden_size=HIDDEN, num_attention_heads=HEADS, num_hidden_layers=LAYERS)
    config = layer_keys(norm_before_residual=False) | {LAYER_IDS: [2, 4, 5]}
    published = write_checkpoint(tmp_path / "p", config, eagle3_tensors({}, layers=layers, head_norms=head_norms))
    around = Surroundings(torch.randn(VOCABULARY, HIDDEN), torch.randn(5, HIDDEN), torch.arange(5))
    save_eagle3(tmp_path / "out", loaded(published, model, "EAGLE-3"), model, around)
    assert ("eagle_config" in json.loads((tmp_path / "out" / "config.json").read_text())) == known


def test_a_whole_vocabulary_needs_no_mapping(target, tmp_path):
    out = trained(target, tmp_path / "out", "--vocabulary", "5000")
    assert not {"d2t", "t2d"} & load_file(out / "model.safetensors").keys()
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 300
    assert load(target, out).drafter.lm_head.rows.out_features == 300


def test_a_drafter_of_a_different_target_is_refused(folders, tmp_path):
    """Its sizes fit, so only the sample of the weights tells. Without target.json it loads."""
    save_folder(tmp_path / "other", tiny_llama(7, vocab_size=300, num_hidden_layers=LAYERS), tiny_tokenizer())
    out = shutil.copytree(folders["usual"], tmp_path / "out")
    assert "was trained for tiny" in refusal(tmp_path / "other", out)
    (out / "target.json").write_text('{"version": 1}')
    assert "target.json is damaged" in refusal(tmp_path / "other", out)
    (out / "target.json").unlink()
    assert load(tmp_path / "other", out).drafter_kind == "EAGLE-3"


def test_a_continued_drafter_keeps_its_flags_and_vocabulary(target, folders, tmp_path):
    flags = {"norm_output": True, "norm_before_residual": True}
    start = changed(folders["last"], tmp_path / "start", **flags)
    out = trained(target, tmp_path / "out", "--start", str(start), "--vocabulary", "20")
    assert load(target, out).drafter.conventions == load(target, start).drafter.conventions
    before, after = (load_file(folder / "model.safetensors") for folder in (start, out))
    assert torch.equal(before["d2t"], after["d2t"]) and torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    assert not torch.equal(before["fc.weight"], after["fc.weight"])


def test_what_a_drafter_borrows_is_not_stored_when_it_is_continued(target, folders, tmp_path):
    """The embedded head is an example: embedding and output rows would be most of its files."""
    start, borrowed = shutil.copytree(folders["usual"], tmp_path / "start"), ("embed_tokens.weight", "lm_head.weight")
    kept = {name: part for name, part in load_file(start / "model.safetensors").items() if name not in borrowed}
    save_file(kept, start / "model.safetensors")
    out = trained(target, tmp_path / "out", "--start", str(start), has_engine=True)
    assert load_file(out / "model.safetensors").keys() == kept.keys()
    before, after = (load(target, folder).drafter for folder in (start, out))
    assert torch.equal(before.lm_head.rows.weight, after.lm_head.rows.weight)
    assert torch.equal(before.lm_head.vocabulary, after.lm_head.vocabulary)
    assert not torch.equal(before.fc.weight, after.fc.weight)


def test_idle_parts_of_a_continued_drafter_stay_idle(target, tmp_path):
    """A first layer that reads its own position through any matrix, without an MLP, and equal heads in the second."""
    hidden, config = 32, {**WINDOW, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 1}
    config = layer_keys(**config, norm_before_residual=True, hidden_size=hidden, intermediate_size=64, head_dim=8)
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, LAYER_IDS: [2, 4, 5]}
    tensors = two_layers(hidden)
    start = write_checkpoint(tmp_path / "start", config, tensors)
    pair = load(target, start)
    swap_linears([pair.drafter], CompiledBuilder(EngineWeights(), [pair.target]), unreported)
    assert type(pair.drafter.fc) is EngineLinear and can_be_stored(pair.drafter), "whatever layers an engine puts in"
    model = pair.target
    write_target_file(start, model, window=20)
    out = trained(target, tmp_path / "out", "--start", str(start))
    stored = load_file(out / "model.safetensors")
    assert {name: part.shape for name, part in stored.items() if "layers." in name} == {
        name: part.shape for name, part in tensors.items() if "layers." in name
    }
    assert not stored["layers.0.mlp.down_proj.weight"].any() and not stored["layers.0.self_attn.q_proj.weight"].any()
    keys = stored["layers.1.self_attn.k_proj.weight"].unflatten(0, (2, 2, 8))
    assert torch.equal(keys[:, 0], keys[:, 1]) and not torch.equal(keys[0], keys[1])
    before, after = (load_student(folder, Target(model, None, torch.ones(1))).head for folder in (start, out))
    assert [[layer.self_attn.sliding_window for layer in each.layers] for each in (before, after)] == [[1, 20]] * 2
    for name, part in after.state_dict().items():
        assert ("norm" in name or "fc" in name) or not torch.equal(part, before.state_dict()[name]), name


def two_layers(hidden):
    """Tensors of a drafter whose first layer only mixes, with pairs of equal heads in the second."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator) * 0.2

    tensors = {"fc.weight": drawn(hidden, 3 * hidden), "norm.weight": torch.ones(hidden)}
    for index in range(2):
        name, columns = f"layers.{index}", hidden * (2 - index)
        heads = drawn(2, 1, 8, columns).expand(2, 2, 8, columns).reshape(hidden, columns)
        zero = index == 0
        parts = {part: torch.zeros(hidden, columns) if zero else heads for part in ("q_proj", "k_proj")}
        parts |= {
            "v_proj": drawn(hidden, columns) if zero else heads,
            "o_proj": torch.eye(hidden) if zero else drawn(hidden, hidden),
        }
        tensors |= {f"{name}.self_attn.{part}.weight": weight.clone() for part, weight in parts.items()}
        for part, shape in (("gate_proj", (64, hidden)), ("up_proj", (64, hidden)), ("down_proj", (hidden, 64))):
            tensors[f"{name}.mlp.{part}.weight"] = torch.zeros(shape) if zero else drawn(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if zero else [])):
            tensors[f"{name}.{norm}.weight"] = torch.ones(hidden)
    return tensors


def test_a_new_drafter_reads_embeddings_without_the_factor_of_its_target(tmp_path):
    """As load_eagle3 gives them to it."""
    config = Gemma3TextConfig(**DECODER | {"num_hidden_layers": LAYERS, "head_dim": 8})
    model = build(Gemma3ForCausalLM, config, 0)
    plan = TrainingPlan("x", vocabulary=20)
    student = create_student(Target(model, None, model.lm_head.weight.detach()), Corpus(tmp_path), plan)
    ids = torch.tensor([3, 5])
    assert torch.equal(student.embed(ids), model.get_input_embeddings().weight[ids])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_the_package_computes_the_same_drafts(target, tmp_path, kind):
    """The logits of speculators 0.9.0 with the verifier's embedding, against those of a session."""
    packages = tmp_path / "packages"
    for words in PACKAGES:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages), *words]
        installed = subprocess.run(command, capture_output=True, text=True, check=False)
        if installed.returncode:
            pytest.skip(f"{words[-1]} cannot be installed here: {installed.stderr.strip()[-200:]}")
    check_package(target, trained(target, tmp_path / "out", "--kind", kind), tmp_path, packages)


def check_package(target: Path, folder: Path, root: Path, packages: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(9, 3 * 32, generator=generator)
    save_file({"features": features, "tokens": torch.randint(300, (9,), generator=generator)}, root / "run")
    keys = json.loads((folder / "config.json").read_text())["speculators_config"]
    named = keys | {"verifier": keys["verifier"] | {"name_or_path": str(target)}}
    out = changed(folder, root / "named", speculators_config=named)
    path = os.pathsep.join([str(packages), str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, str(ROOT / "tests" / "speculators_reader.py"), str(out), str(root / "run")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
    assert ran.returncode == 0, ran.stderr[-2000:]
    run, stored = load_file(root / "run"), load_file(out / "model.safetensors")
    session, ids = feature_session(load(target, out).drafter), stored["d2t"] + torch.arange(150)
    context = [0, *run["tokens"].tolist()]
    session.begin(context[:1])
    for last in range(run["logits"].shape[1]):
        session.rewind(last + 1)
        session.add_features(run["features"][last : last + 1], last, last + 1)
        for step, rows in enumerate(run["logits"]):
            logits = session.feed(context[: last + 2 + step], keep=1)[0]
            difference = float((logits[ids] - rows[last]).abs().max())
            assert difference < 1e-4, (last, step, difference, float(rows.std()), logits.dtype)
