"""Every quantization on tiny models: on either side of a pair, with a drafter cut out of the target, of GGUF files; what is refused."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from shelf import refusal
from tiny import save_folder, tiny_llama, tiny_t5, tiny_tokenizer
from tiny_gguf import write_gguf
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import infer
from utils.arguments import parse_arguments
from utils.bounds import QUANTIZATIONS
from utils.errors import UserError
from utils.models import gguf_files, loading, quantization, weights
from utils.models.layer_cut import first_layers
from utils.models.loading import Pair, PairRequest, load_pair
from utils.models.pairs import PAIRS
from utils.models.quantization import check_kind

IDS = torch.tensor([[5, 9, 33, 12, 7, 41]])
QUANTIZED = {"int8": "QLinear", "int4": "QLinear", "bnb-int8": "Linear8bitLt", "nf4": "Linear4bit"}
NEAR = {"int8": 0.99, "int4": 0.4, "bnb-int8": 0.99, "nf4": 0.4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Wide enough for several groups of 32, 64 or 128 weights in a row.
    model = tiny_llama(vocab_size=300, hidden_size=64, intermediate_size=256, num_hidden_layers=3)
    return save_folder(tmp_path_factory.mktemp("model") / "wide", model, tiny_tokenizer())


def load(folder: Path, drafter: str, **words: str) -> Pair:
    return load_pair(PairRequest(str(folder), drafter, device="cpu", **words), lambda line: None)


def gguf(path: Path) -> Path:
    return write_gguf(path, tiny_llama(vocab_size=300, hidden_size=64, intermediate_size=256), tiny_tokenizer())


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def test_every_kind_is_tested() -> None:
    assert {"none", *QUANTIZED} == set(QUANTIZATIONS)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantized_target_is_near_the_full_one(folder: Path, kind: str) -> None:
    full, small = load(folder, "layers:1").target, load(folder, "layers:1", quantize=kind).target
    assert {type(part).__name__ for part in small.model.layers.modules() if "Linear" in type(part).__name__} == {QUANTIZED[kind]}
    assert type(small.lm_head) is nn.Linear and torch.equal(small.lm_head.weight, full.lm_head.weight)
    assert not any(part.training for part in small.modules())
    similarity = torch.cosine_similarity(logits(full), logits(small), dim=-1).min()
    assert NEAR[kind] < similarity < 1 - 1e-6


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4)])
def test_no_weight_is_off_by_more_than_half_a_step(folder: Path, kind: str, bits: int) -> None:
    for drop in ("up_proj", "down_proj"):  # a scale per row; several groups in a row
        full, small = (getattr(load(folder, "layers:1", quantize=word).target.model.layers[0].mlp, drop).weight for word in ("none", kind))
        assert (small.dequantize() - full).abs().max() <= 1.01 * full.abs().max() / (2**bits - 2)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_memory_is_that_of_the_kind(folder: Path, kind: str) -> None:
    """Weights of so many bits, and scales: nothing of the full ones is left, and none is kept mapped."""
    pair = load(folder, "layers:1", quantize=kind)
    target, full = pair.target, load(folder, "layers:1").target
    linear = sum(part.weight.numel() for name, part in full.named_modules() if type(part) is nn.Linear and name != "lm_head")
    rest = sum(part.nbytes for part in (*full.parameters(), *full.buffers())) - 4 * linear
    packed = linear if "8" in kind else linear // 2
    assert packed + rest < pair.memory < 1.3 * packed + rest + 2000 and pair.drafter_memory == 0
    held = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in target.parameters() if type(part) is nn.Parameter
    }
    assert sum(held.values()) <= rest


def storages() -> dict[int, int]:
    """Bytes of the memory behind every plain tensor that is alive, by address."""
    gc.collect()
    alive = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter) and thing.device.type == "cpu"]
    return {thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes() for thing in alive}


@pytest.mark.parametrize("kind", ["none", *QUANTIZED])
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_nothing_else_stays_alive(folder: Path, tmp_path: Path, own_cache: Path, kind: str, form: str) -> None:
    path = folder if form == "folder" else gguf(tmp_path / "tiny.gguf")
    load(path, "layers:1", quantize=kind)  # what libraries keep for good is there now
    before = storages()
    pair = load(path, "layers:1", quantize=kind)
    logits(pair.target)
    grown = sum(size for place, size in storages().items() if place not in before)
    assert grown <= pair.memory * 1.05 + 10_000  # a file's header, what bitsandbytes notes of a product


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells nowhere what is mapped")
@pytest.mark.parametrize("kind", QUANTIZED)
def test_the_file_of_the_full_weights_is_let_go(tmp_path: Path, kind: str) -> None:
    path = save_folder(tmp_path / "mapped", tiny_llama(vocab_size=300, hidden_size=64), tiny_tokenizer())
    plain = load(path, "layers:1")
    assert str(path) in Path("/proc/self/maps").read_text()  # or this test finds nothing
    del plain
    pair = load(path, "layers:1", quantize=kind)
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text() and pair.memory


def test_memory_counts_what_is_shared_once(tmp_path: Path) -> None:
    tied = save_folder(tmp_path / "tied", tiny_llama(vocab_size=300, tie_word_embeddings=True), tiny_tokenizer())
    pair = load(tied, str(tied))
    assert pair.memory == pair.drafter_memory == sum(part.nbytes for part in (*pair.target.parameters(), *pair.target.buffers()))
    assert weights.stored_bytes(pair.target, besides=pair.target) == 0


@pytest.mark.parametrize("kind", QUANTIZED)
def test_tied_embeddings_stay_tied(tmp_path: Path, kind: str) -> None:
    tied = save_folder(tmp_path / "tied", tiny_llama(vocab_size=300, hidden_size=64, tie_word_embeddings=True), tiny_tokenizer())
    small = load(tied, "layers:1", quantize=kind).target
    assert small.lm_head.weight is small.model.embed_tokens.weight
    assert torch.equal(small.lm_head.weight, load(tied, "layers:1").target.lm_head.weight)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("run_target_first", [True, False])
def test_a_cut_of_a_quantized_target(folder: Path, kind: str, run_target_first: bool) -> None:
    """The first forward may repack shared weights: neither order may disturb the other model."""
    target = load(folder, "layers:1", quantize=kind).target
    before = logits(target) if run_target_first else None
    cut = first_layers(target, 2)
    drafted = logits(cut)
    owned = {tensor.data_ptr() for tensor in [*target.parameters(), *target.buffers()]}
    assert all(tensor.data_ptr() in owned for tensor in [*cut.parameters(), *cut.buffers()])
    after = logits(target)
    assert torch.equal(logits(cut), drafted) and not torch.equal(drafted, after)
    assert before is None or torch.equal(before, after)
    alone = load(folder, "layers:1", quantize=kind).target
    assert torch.equal(logits(alone), after)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantized_drafter_beside_a_full_target(folder: Path, kind: str) -> None:
    pair = load(folder, str(folder), drafter_quantize=kind)
    assert pair.drafter is not None and pair.drafter_memory is not None
    assert type(pair.drafter.model.layers[0].mlp.up_proj).__name__ == QUANTIZED[kind]
    assert type(pair.target.model.layers[0].mlp.up_proj) is nn.Linear
    assert (pair.quantize, pair.drafter_quantize) == ("none", kind) and pair.drafter_memory < pair.memory
    assert not any("texts can part" in note for note in pair.notes)  # what drafts does not decide the text


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_generation_with_the_pair(folder: Path, kind: str, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    pair = load(folder, "layers:2", quantize=kind, dtype=dtype)
    state = pair.engine.use("auto", 1)
    assert state.kind == "plain" and ("quantized" if dtype == "float32" else "float32 only") in state.reason
    pair.target.generation_config.pad_token_id = 0
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        out = pair.target.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=False)
    assert out.shape == (1, 12) and not caplog.records


@pytest.mark.parametrize("kind", QUANTIZED)
def test_an_encoder_decoder(tmp_path: Path, kind: str) -> None:
    save_folder(tmp_path / "t5", tiny_t5(vocab_size=300), tiny_tokenizer())
    target = load(tmp_path / "t5", str(tmp_path / "t5"), quantize=kind).target
    assert type(target.lm_head) is nn.Linear and type(target.decoder.block[0].layer[0].SelfAttention.q).__name__ == QUANTIZED[kind]
    with torch.no_grad():
        assert target(input_ids=IDS, decoder_input_ids=IDS).logits.isfinite().all()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_gguf_file(tmp_path: Path, own_cache: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model from the file, whether it was converted first, or is quantized where it stands."""
    path = gguf(tmp_path / "tiny.gguf")
    target = load(path, "layers:1", quantize=kind).target
    assert type(target.model.layers[0].mlp.up_proj).__name__ == QUANTIZED[kind] and type(target.lm_head) is nn.Linear
    monkeypatch.setattr(loading, "converted", lambda source, where: source)
    check = quantization._check_runs

    def checked(model: Any, *words: str) -> None:
        assert not any(part.training for part in model.modules())  # kernels for training are others
        check(model, *words)

    monkeypatch.setattr(quantization, "_check_runs", checked)
    pair = load(path, "layers:1", quantize=kind)
    assert type(pair.target.model.layers[0].mlp.up_proj).__name__ == QUANTIZED[kind] and type(pair.target.lm_head) is nn.Linear
    assert torch.equal(logits(pair.target), logits(target)) and pair.memory == weights.stored_bytes(target)
    assert not any(part.training for part in pair.target.modules())


def test_nothing_is_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from optimum.quanto.library.extensions import extension

    def compile(**words: Any) -> None:
        raise AssertionError("a compiler was called")

    monkeypatch.setattr(extension, "load", compile)
    monkeypatch.setenv("PATH", "")
    for known in extension._extensions.values():
        monkeypatch.setattr(known, "_lib", None)
    assert logits(load(folder, "layers:1", quantize="int4").target).isfinite().all()


@pytest.mark.parametrize("kind", ["int3", "", "INT8"])
def test_unknown_kinds_name_the_known_ones(kind: str) -> None:
    with pytest.raises(UserError, match="none, int8, int4, bnb-int8, nf4"):
        check_kind(kind, "cpu")


@pytest.mark.parametrize("kind", ["bnb-int8", "nf4"])
def test_bitsandbytes_is_refused_on_mps(kind: str) -> None:
    with pytest.raises(UserError, match="does not run on mps: use int8, or --device cpu"):
        check_kind(kind, "mps")
    check_kind("int8", "mps")


def test_int4_of_a_width_that_no_group_divides(tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=300, intermediate_size=200)
    odd = save_folder(tmp_path / "odd", model, tiny_tokenizer())
    assert "down_proj has 200 columns, not a multiple of 32; use int8 or nf4" in refusal(odd, "layers:1", quantize="int4")
    assert load(odd, "layers:1", quantize="int8").quantize == "int8"
    assert load(odd, "layers:1", quantize="nf4").quantize == "nf4"


def test_a_model_without_linear_layers(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=None, eos_token_id=None)
    save_folder(tmp_path / "gpt2", GPT2LMHeadModel(config).eval(), tiny_tokenizer())
    assert "no linear layers that int8 could be made of" in refusal(tmp_path / "gpt2", "layers:1", quantize="int8")


def test_a_kernel_that_fails_is_one_sentence_at_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(packed: torch.Tensor, bits: int) -> torch.Tensor:
        raise NotImplementedError("no such kernel\nadvice")

    monkeypatch.setattr(quantization, "_unpack", broken)
    sentence = refusal(folder, "layers:1", quantize="int4")
    assert sentence == "'wide' does not run in int4 on cpu, torch.float32 (no such kernel): use another --quantize."
    monkeypatch.setattr(quantization, "_unpack", lambda packed, bits: (_ for _ in ()).throw(MemoryError()))
    assert "does not fit into memory" in refusal(folder, "layers:1", quantize="int4")


@pytest.mark.parametrize("kernel", [True, False])
def test_notes_on_texts_and_time(folder: Path, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "has_nf4_kernel", lambda: kernel)

    def notes(**words: str) -> list[tuple[bool, bool]]:
        found = load(folder, str(folder), **words).notes
        return [("texts can part" in note, "slower than float32" in note) for note in found]

    text, time = (True, False), (False, True)
    assert notes() == []
    assert notes(dtype="bfloat16") == [text]
    assert notes(quantize="int8") == notes(quantize="int4") == notes(drafter_quantize="bnb-int8") == [time]
    assert notes(quantize="int8", drafter_quantize="int4") == [time, time]
    assert notes(quantize="bnb-int8") == notes(quantize="int4", dtype="bfloat16") == [text, time]
    assert notes(quantize="int8", dtype="bfloat16") == [text]
    assert notes(quantize="nf4") == [time]
    assert notes(quantize="nf4", dtype="bfloat16") == ([text] if kernel else [text, time])


def test_only_bnb_int8_depends_on_the_window(folder: Path) -> None:
    """What the notes say of float32: a row's logits change with its company by its rounding, and under bnb-int8 by much more."""
    moved = {}
    for kind in QUANTIZED:
        target = load(folder, "layers:1", quantize=kind).target
        with torch.no_grad():
            moved[kind] = (target(input_ids=IDS[:, :1]).logits[0, 0] - logits(target)[0, 0]).abs().max()
    assert max(moved[kind] for kind in ("int8", "int4", "nf4")) < 1e-4 < 1e-2 < moved["bnb-int8"]


def settled(device: str, *flags: str) -> tuple[str | None, str | None]:
    request = loading._settled(infer.pair_request(parse_arguments([*flags])), device)
    return request.quantize, request.drafter_quantize


def test_the_classic_pair_is_int8_on_cuda() -> None:
    assert {name for name, pair in PAIRS.items() if pair.cuda_quantize != "none"} == {"llama-3.2"}
    assert settled("cuda", "--pair", "llama-3.2") == settled("cuda:1", "--pair", "llama-3.2") == ("int8", "int8")
    assert settled("cpu", "--pair", "llama-3.2") == settled("mps", "--pair", "llama-3.2") == ("none", "none")
    assert settled("cuda", "--pair", "llama-3.2", "--quantize", "none") == ("none", "int8")
    assert settled("cuda", "--pair", "llama-3.2", "--quantize", "nf4", "--drafter-quantize", "none") == ("nf4", "none")
    assert settled("cuda", "--pair", "qwen3") == settled("cuda") == settled("cuda", "--target", "x") == ("none", "none")
    assert settled("cpu", "--quantize", "int4") == ("int4", "none")


def test_sizes_for_people() -> None:
    assert [weights.in_units(size) for size in (0, 999, 1000, 538_090_408, 999_700_000, 12_345_678_901)] == [
        "0 bytes",
        "999 bytes",
        "1 kB",
        "538 MB",
        "1000 MB",
        "12.3 GB",
    ]


def test_a_full_disk_still_quantizes_a_gguf_file(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "ROOM", 1e12)
    assert type(load(gguf(tmp_path / "tiny.gguf"), "layers:1", quantize="nf4").target.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
