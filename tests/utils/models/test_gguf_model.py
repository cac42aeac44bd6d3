"""GGUF files that are loaded in their blocks: equal to the unpacked model in every bit, without its memory."""

from __future__ import annotations

import gc
import os
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from shelf import load, refusal
from tiny import tiny_llama, tiny_tokenizer
from tiny_gguf import write_gguf
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from utils.engine import weight_format
from utils.engine.engine import LAYER_ENGINES
from utils.engine.read_decoder import read_decoder
from utils.engine.selftest import sample_logits
from utils.engine.stored_weights import RowTable, in_files, rows_of
from utils.engine.weight_blocks import BlockWeight
from utils.engine.weight_format import EngineWeights
from utils.errors import UserError
from utils.models import checkpoints, gguf_model
from utils.pairs import load_pair as loading
from utils.pairs.pair import Pair

PARTS = ("_proj", "embed_tokens")
GGUF = {"engine_weights": "gguf"}


@pytest.fixture
def file(tmp_path: Path, own_cache: Path) -> Path:
    return written(tmp_path / "tiny.gguf")


def written(path: Path, kind: str = "Q4_1", parts: tuple[str, ...] = PARTS) -> Path:
    model = tiny_llama(vocab_size=300, hidden_size=64, intermediate_size=256, num_key_value_heads=2)
    return write_gguf(path, model, tiny_tokenizer(), kind=kind, parts=parts)


def load_unpacked(file: Path, drafter: str, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> Pair:
    """Load in float32 first, as models that cannot be read are loaded."""
    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_in_blocks", lambda *_: "a test asks for it")
        patch.setattr(checkpoints, "load_from_files", lambda *_: None)
        return load(file, drafter, **flags)


def without_data(model: nn.Module) -> set[str]:
    return {name for name, part in model.named_parameters() if part.is_meta}


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_logits_have_the_bits_of_the_unpacked_model(
    kind: str, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "tiny.gguf", kind)
    unpacked = load_unpacked(file, "layers:1", monkeypatch, **GGUF)
    pair = load(file, "layers:1", engine_weights="gguf")
    assert not without_data(unpacked.target)
    # All but the output head, whose rows draft heads read.
    linears = {name for name, part in pair.target.named_modules() if isinstance(part, nn.Linear)} - {"lm_head"}
    assert linears and without_data(pair.target) == {f"{name}.weight" for name in linears}
    for one in (pair, unpacked):
        assert one.engine.use("invariant", 1).kind == "invariant"
    assert torch.equal(sample_logits(pair.target), sample_logits(unpacked.target))
    assert torch.equal(sample_logits(pair.drafter), sample_logits(unpacked.drafter))
    table: Any = pair.target.get_input_embeddings().weight
    assert pair.engine.nbytes() == unpacked.engine.nbytes() - table.nbytes + table.held.nbytes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["F16", "BF16", "F32", "Q5_0"])
def test_matrices_of_every_type_stay_in_the_file(
    *, kind: str, tied: bool, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(vocab_size=300, hidden_size=64, num_key_value_heads=2, tie_word_embeddings=tied)
    file = write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer(), kind=kind, parts=(*PARTS, "lm_head"))
    pair, unpacked = load(file), load_unpacked(file, "layers:1", monkeypatch)
    assert in_files(pair.target) and not in_files(unpacked.target)
    for stored in own_cache.rglob("model.safetensors"):
        assert stored.stat().st_size < 300 * 64
    for engine in ("invariant", "plain"):
        for one in (pair, unpacked):
            one.engine.use(engine, 1)
        assert torch.equal(sample_logits(pair.target), sample_logits(unpacked.target))


OTHER_FAMILIES: dict[str, dict[str, bool]] = {
    "starcoder2": {"use_bias": True},
    "stablelm": {"use_qkv_bias": True},
    "nemotron": {},
}


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_families_without_a_forward_pass_of_our_own_stay_in_the_file(
    family: str, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        family, vocab_size=300, num_hidden_layers=3, max_position_embeddings=256, **sizes, **OTHER_FAMILIES[family]
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for part in model.parameters():
        nn.init.normal_(part, std=0.1)
    file = write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer(), kind="Q4_1", parts=("layers.",))
    unpacked = load_unpacked(file, "layers:1", monkeypatch, **GGUF)
    for engine_weights in ("gguf", "float32"):
        pair = load(file, "layers:1", engine_weights=engine_weights)
        assert isinstance(read_decoder(pair.target), str) and in_files(pair.target) and not in_files(unpacked.target)
        pair.engine.use("invariant", 1)
        if engine_weights == "gguf":
            unpacked.engine.use("invariant", 1)
            assert torch.equal(sample_logits(pair.target), sample_logits(unpacked.target))
    # What transformers converts in a way that is not known is unpacked, and compared again at the next start.
    shutil.rmtree(own_cache)
    process = gguf_model.GgufBlocks.matrix
    with monkeypatch.context() as patch:
        patch.setattr(gguf_model.GgufBlocks, "matrix", lambda *arguments: process(*arguments).flip(0))
        patch.setattr(gguf_model.GgufBlocks, "__contains__", lambda *_: False)
        assert not in_files(load(file, "layers:1").target)
    assert in_files(load(file, "layers:1").target)


ROWS = torch.tensor([[3, 299], [0, 3]])
MASK = torch.arange(300) % 7 == 2
CHOICES = (5, -1, slice(2, 9), slice(None, None, 40), ROWS, ROWS - 300, MASK, (slice(2, 9), slice(1, 3)))


@torch.no_grad()
@pytest.mark.parametrize(("tied", "kind"), [(False, "Q4_1"), (True, "Q4_0"), (True, "Q8_0")])
def test_rows_of_embedding_and_head_are_unpacked_when_they_are_read(
    *, tied: bool, kind: str, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(vocab_size=300, hidden_size=64, num_key_value_heads=2, tie_word_embeddings=tied)
    parts = (*PARTS, "lm_head")
    target = load(write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer(), kind=kind, parts=parts)).target
    tables = [target.get_input_embeddings().weight, target.get_output_embeddings().weight]
    assert all(isinstance(table, RowTable) for table in tables) and (tables[0] is tables[1]) == tied
    [stored] = own_cache.rglob("model.safetensors")
    assert stored.stat().st_size < 300 * 64
    unpacked, counts = gguf_model.unpacked, list[int]()
    monkeypatch.setattr(gguf_model, "unpacked", lambda kind, data: counts.append(len(data)) or unpacked(kind, data))
    takes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda weight: torch.nn.functional.embedding(ROWS, weight),
        *(partial(lambda own, weight: weight[own], own) for own in CHOICES),
    ]
    columns: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda weight: weight[:, 3:9],
        lambda weight: weight[ROWS, ROWS % 64],
        lambda weight: weight[MASK[:, None].expand(300, 64)],
        lambda weight: weight.float().sum(0),
    ]
    for table, name in zip(tables, ("lm_head" if tied else "model.embed_tokens", "lm_head"), strict=True):
        dense = table.source.blocks[name].dense()
        counts.clear()
        for take in takes:
            assert torch.equal(take(table), take(dense))
        assert not counts
        for take in columns:
            assert torch.equal(take(table), take(dense))


def test_the_budget_has_room_for_a_weight_that_is_unpacked(file: Path) -> None:
    [model, *_] = load(file).engine._models
    head, linears = model.get_output_embeddings(), (part for part in model.modules() if isinstance(part, nn.Linear))
    layers = max(part.in_features * part.out_features for part in linears if part is not head)
    rounded, loaded = (weight_format._working_bytes([model], EngineWeights(form)) for form in ("int8", "float32"))
    assert rounded - loaded == 5 * max(layers, head.weight.numel()) - max(5 * layers, 2 * head.weight.numel()) > 0


def test_a_model_that_does_not_fit_is_refused_with_the_blocks_of_its_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_format, "_working_bytes", lambda models, weights: 0)
    pair, planned = load(file), load(file, engine_weights="gguf").engine
    need = LAYER_ENGINES["invariant"](planned._models, [], planned._weights).need() + planned.nbytes()
    for free in (need, need // 2):
        pair.engine.available = lambda free=free: free
        with pytest.raises(UserError) as caught:
            pair.engine.use("auto", 1)
        assert ("--engine-weights gguf" in str(caught.value)) == (free == need), caught.value


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_memory_that_is_planned_is_that_of_the_blocks(kind: str, tmp_path: Path, own_cache: Path) -> None:
    """And those of int8, of a drafter that is no GGUF file. Weights in files of float32 stay as they are."""
    tiny_llama(1, vocab_size=300, hidden_size=64, intermediate_size=256).save_pretrained(tmp_path / "drafter")
    tiny_tokenizer().save_pretrained(tmp_path / "drafter")
    pair = load(written(tmp_path / "tiny.gguf", kind), str(tmp_path / "drafter"), engine_weights="gguf")
    engine = pair.engine
    held, need = engine.nbytes(), LAYER_ENGINES["invariant"](engine._models, [], engine._weights).need()
    engine.use("invariant", 1)
    assert 0.9 * need <= engine.nbytes() - held <= 1.1 * need


def test_config_tokenizer_and_generation_config_are_those_of_the_unpacked_model(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, unpacked = load(file, **GGUF), load_unpacked(file, "layers:1", monkeypatch, **GGUF)
    assert pair.tokenizer.backend_tokenizer.to_str() == unpacked.tokenizer.backend_tokenizer.to_str()
    assert pair.tokenizer.chat_template == unpacked.tokenizer.chat_template
    assert (pair.end_ids, pair.target_name, pair.dtype) == (unpacked.end_ids, unpacked.target_name, unpacked.dtype)
    ours, theirs = pair.target.config.to_dict(), unpacked.target.config.to_dict()
    for key in ("_name_or_path", "architectures"):
        ours.pop(key, None), theirs.pop(key, None)
    assert ours == theirs and pair.target.config._attn_implementation == unpacked.target.config._attn_implementation
    assert pair.target.generation_config.to_dict() == unpacked.target.generation_config.to_dict()
    assert type(pair.target) is type(unpacked.target) and not pair.target.training


def test_no_float32_copy_of_a_weight_is_alive(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = load(file, "layers:1", engine_weights="gguf")
    unpacked = dict(load_unpacked(file, "layers:1", monkeypatch, **GGUF).target.named_parameters())
    weights = [unpacked[name].detach() for name, part in pair.target.named_parameters() if part.is_meta]
    before = live_tensors()  # of other tests; the list keeps their identities from being reused
    known = set(map(id, before))
    pair.engine.use("invariant", 1)
    alive = [item for item in live_tensors() if id(item) not in known and not item.is_meta]
    # By value: buffers of activations may have the shape of a weight.
    plain = [item for item in alive if item.dtype is torch.float32 and item.layout is torch.strided]
    assert not [item for item in plain for weight in weights if torch.equal(item, weight)]


def test_a_tied_head_is_found_in_the_file_without_other_blocks(tmp_path: Path, own_cache: Path) -> None:
    """So that its values need not be unpacked and compared."""
    model = tiny_llama(vocab_size=300, hidden_size=64, tie_word_embeddings=True)
    path = write_gguf(tmp_path / "tied.gguf", model, tiny_tokenizer(), kind="Q8_0", parts=PARTS)
    weight = load(path, "layers:1", engine_weights="gguf").target.get_output_embeddings().weight
    none = EngineWeights("gguf", {})
    whole, part = (
        none.form("lm_head", weight, is_head=True),
        none.form("lm_head[8:24]", rows_of(weight, slice(8, 24)), is_head=True),
    )
    assert isinstance(whole, BlockWeight) and torch.equal(whole.dense(), weight)
    assert isinstance(part, BlockWeight) and torch.equal(part.dense(), weight[8:24])


def live_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]


def test_transformers_own_forward_unpacks_what_it_needs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, unpacked = load(file, "layers:1", **GGUF), load_unpacked(file, "layers:1", monkeypatch, **GGUF)
    assert torch.equal(sample_logits(pair.drafter), sample_logits(unpacked.drafter))
    assert without_data(pair.target) and not without_data(pair.drafter)
    assert torch.equal(sample_logits(pair.target), sample_logits(unpacked.target))
    shared = {id(part) for part in pair.target.parameters()}
    assert all(id(part) in shared for part in pair.drafter.parameters())
    assert pair.engine.use("invariant", 1).weights == "gguf"


def test_an_interrupted_installation_leaves_a_model_that_computes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, unpacked = load(file, "layers:1", **GGUF), load_unpacked(file, "layers:1", monkeypatch, **GGUF)
    with monkeypatch.context() as patch:
        patch.setattr("utils.engine.selftest.width_dependence", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.engine.use("invariant", 1)
    assert torch.equal(sample_logits(pair.target), sample_logits(unpacked.target))


def interrupt(*_: object, **__: object) -> str:
    raise KeyboardInterrupt


def test_later_loads_do_not_parse_the_file_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sample_logits(load(file, engine_weights="gguf").target)
    monkeypatch.setattr(gguf_model, "GGUFReader", lambda path: pytest.fail("the file was parsed"))
    assert torch.equal(sample_logits(load(file, engine_weights="gguf").target), first)


@pytest.mark.parametrize(
    ("way", "weights"),
    [
        ("overwritten", "gguf"),
        ("replaced", "float32"),
        pytest.param("overwritten", "float32", marks=pytest.mark.full),
        pytest.param("replaced", "gguf", marks=pytest.mark.full),
    ],
)
def test_a_file_of_the_same_size_and_time_is_noticed(file: Path, tmp_path: Path, way: str, weights: str) -> None:
    """It is prepared again, results that are stored for the old one are not used, and a loaded model says so."""
    pair = load(file, engine_weights=weights)
    known, logits = pair.engine.identity, sample_logits(load(file, engine_weights=weights).target)
    assert known and known == load(file, engine_weights=weights).engine.identity
    before = file.stat()
    other = tiny_llama(3, vocab_size=300, hidden_size=64, intermediate_size=256, num_key_value_heads=2)
    path = file if way == "overwritten" else tmp_path / "other.gguf"
    write_gguf(path, other, tiny_tokenizer(), kind="Q4_1", parts=PARTS)
    os.replace(path, file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(UserError, match="has changed since it was loaded"):
        sample_logits(pair.target)
    changed = load(file, engine_weights=weights)
    assert changed.engine.identity not in ("", known)
    assert not torch.equal(sample_logits(changed.target), logits)


def test_a_full_disk_is_one_sentence_and_the_next_start_recovers(file: Path, own_cache: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, before[1]))
    try:
        sentence = refusal(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "XDG_CACHE_HOME" in sentence and not list(own_cache.glob("gguf/*"))
    assert load(file).engine.identity


def test_a_model_that_cannot_be_read_is_unpacked_and_reported(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_model, "read_decoder", lambda model: "its family is not known")
    monkeypatch.setattr(gguf_model, "packing_problem", lambda model: "its layers are of another type")
    lines: list[str] = []
    source, request = (
        loading.locate(str(file), lines.append),
        loading.PairRequest(str(file), None, device="cpu", quantize="none", engine_weights="gguf"),
    )
    placement = loading.Placement("cpu", torch.float32, lines.append, engine_weights="gguf")
    target = loading._load_target(source, request, placement)
    assert target.weights.blocks
    assert any("unpacked" in line and "its family is not known" in line for line in lines)


def test_weights_that_are_not_finite_or_do_not_fit_are_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("utils.models.memory.free_bytes", lambda device: 1000)
        assert "memory" in refusal(file, engine_weights="gguf")
    stored = load(file, engine_weights="gguf").engine._weights.blocks.index.tensors["model.layers.1.mlp.up_proj"]
    data = bytearray(file.read_bytes())
    data[stored.offset : stored.offset + 2] = b"\x00\x7e"  # the scale of the first block: NaN in float16
    file.write_bytes(data)
    assert "model.layers.1.mlp.up_proj" in refusal(file, engine_weights="gguf")


def test_weights_of_other_shapes_than_the_header_says_are_refused(tmp_path: Path, own_cache: Path) -> None:
    """Transformers does not read the size of heads from files of the architecture llama."""
    model = tiny_llama(vocab_size=300, hidden_size=64, head_dim=32)
    sentence = refusal(write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer()))
    assert "q_proj" in sentence and "(128, 64)" in sentence and "(64, 64)" in sentence


def test_a_cache_that_cannot_be_written_is_named(file: Path, own_cache: Path) -> None:
    own_cache.parent.mkdir(exist_ok=True)
    own_cache.write_text("not a folder")
    assert "XDG_CACHE_HOME" in refusal(file, engine_weights="gguf")


@pytest.mark.full
@pytest.mark.usefixtures("real_embedded_model")
def test_the_embedded_target_has_the_bits_of_its_unpacked_weights() -> None:
    text = "On 24 December 1984 it cost $1,299."
    pair = load("embedded", "head", engine_weights="gguf")
    pair.engine.use("invariant", 1)
    logits, ids = sample_logits(pair.target), pair.tokenizer(text).input_ids
    plain = load("embedded", "head")  # from its float32 folder
    blocks = gguf_model.GgufBlocks(loading.embedded_gguf(print), plain.target)
    unpacked = loading._engine(
        plain.target, loading.LoadedDrafter(plain.drafter), loading.EngineWeights("gguf", blocks), ""
    )
    unpacked.use("invariant", 1)
    assert torch.equal(sample_logits(plain.target), logits)
    assert plain.tokenizer(text).input_ids == ids
    assert plain.tokenizer.backend_tokenizer.to_str() == pair.tokenizer.backend_tokenizer.to_str()
