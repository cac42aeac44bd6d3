"""--engine-weights: every format loads, computes and is named; impossible ones are refused in one sentence."""

from pathlib import Path

import pytest
import torch
from shelf import load, refusal
from tiny import tiny_llama, tiny_tokenizer
from tiny_gguf import write_gguf

from utils.bounds import ENGINE_WEIGHTS
from utils.engine.selftest import sample_logits
from utils.engine.stored_weights import fill
from utils.pairs import load_pair as loading
from utils.pairs.pair import describe_target


@pytest.fixture
def file(tmp_path: Path, own_cache: Path) -> Path:
    """A GGUF file in Q4_1, except the embedding and the head."""
    model = tiny_llama(vocab_size=300, hidden_size=64, intermediate_size=256)
    return write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer(), kind="Q4_1", parts=("_proj",))


@pytest.mark.parametrize("name", [name for name in ENGINE_WEIGHTS if name != "float32"])
def test_every_format_is_computed_and_named(name: str, file: Path) -> None:
    pair = load(file, "layers:1", engine_weights=name)
    exact = sample_logits(pair.target)
    assert f"{name} kernels when the engine starts" in describe_target(pair)
    state = pair.engine.use("invariant", 1)
    assert (state.weights, state.verified) == (name, True) and name in state.sentence()
    assert f"{name} kernels" in describe_target(pair) and "when the engine starts" not in describe_target(pair)
    ours = sample_logits(pair.target)
    assert not torch.equal(ours, exact)
    assert torch.nn.functional.cosine_similarity(ours, exact, dim=-1).min() > 0.97


def test_each_model_is_computed_in_the_blocks_of_its_own_file(file: Path, tmp_path: Path) -> None:
    """Layers of both models have the same names and shapes."""
    other = tiny_llama(seed=7, vocab_size=300, hidden_size=64, intermediate_size=256)
    drafter = write_gguf(tmp_path / "other.gguf", other, tiny_tokenizer(), kind="Q4_1", parts=("_proj",))
    plain = load(file, drafter)
    models = (plain.target, plain.drafter)
    fill(models)
    before = [model.state_dict() for model in models]
    pair = load(file, drafter, engine_weights="gguf")
    pair.engine.use("invariant", 1)
    for model, weights in zip((pair.target, pair.drafter), before, strict=True):
        projections = [(name, part) for name, part in model.named_modules() if name.endswith("_proj")]
        assert projections and all(part.kernel.form.kind == "uint4" for _, part in projections)
        assert all(torch.equal(part.weight, weights[f"{name}.weight"]) for name, part in projections)


def test_a_drafter_that_is_not_a_gguf_file_is_computed_in_int8(file: Path, shelf: Path) -> None:
    """And never in blocks of the target."""
    pair = load(file, shelf / "drafter", engine_weights="gguf")
    exact = sample_logits(pair.drafter)
    pair.engine.use("invariant", 1)
    kernels = [part.kernel for part in pair.drafter.modules() if hasattr(part, "kernel")]
    assert {kernel.form.kind for kernel in kernels} == {"int8"}
    assert (sample_logits(pair.drafter) - exact).norm() < 0.1 * exact.norm()


def test_the_embedded_target_is_computed_in_the_blocks_of_its_wheel(
    file: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not converted to float32 for that."""
    monkeypatch.setattr(loading, "embedded_gguf", lambda report: file)
    monkeypatch.setattr("utils.models.sources.embedded_folder", lambda report: pytest.fail("it was converted"))
    pair = load("embedded", "layers:1", engine_weights="gguf")
    assert pair.engine.use("invariant", 1).weights == "gguf"


def test_formats_that_no_engine_computes_are_refused(shelf: Path, file: Path, tmp_path: Path) -> None:
    assert ".gguf" in refusal(shelf / "target", engine_weights="gguf")
    assert "--quantize" in refusal(file, engine_weights="gguf", quantize="int8")
    for name in ("bfloat16", "int8", "int4"):
        assert "--dtype" in refusal(shelf / "target", engine_weights=name, dtype="bfloat16")
    plain = write_gguf(tmp_path / "plain.gguf", tiny_llama(vocab_size=300), tiny_tokenizer(), parts=())
    assert "Q4_K" in refusal(plain, engine_weights="gguf")


def test_weights_that_are_rounded_are_noted(file: Path) -> None:
    noted = {name for name in ENGINE_WEIGHTS if len(load(file, "layers:1", engine_weights=name).notes) == 1}
    assert noted == {"bfloat16", "int8", "int4"}
