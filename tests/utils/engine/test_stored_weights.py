"""Weights that stay in the user's files: the same bits as weights in memory, and files that change."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import COMMON, SLIDING_FIRST, randomized, tiny_model
from shelf import load, write_wide_gguf
from stored_models import changed_bytes, from_files, loaded, overwrite, write_wide_gguf_of
from tiny import build, save_folder, tiny_llama, tiny_tokenizer
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from utils.decode import sliding_window
from utils.decode.layer_cut import first_layers
from utils.decode.model_session import ModelSession
from utils.engine import Engine
from utils.engine.engine import LAYER_ENGINES
from utils.engine.layer_engine import unreported
from utils.engine.stored_results import ResultFile
from utils.engine.stored_weights import RowTable, fill, in_files, release, source_of
from utils.engine.weight_blocks import BlockWeight
from utils.engine.weight_format import EngineWeights, tensor_bytes
from utils.errors import UserError
from utils.models.checkpoints import load_model
from utils.models.memory import Placement
from utils.models.sources import Source
from utils.pairs.pair import Pair

CONTEXT = [5 * index % 96 for index in range(90)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@torch.no_grad()
def computed(model: Any, engine: str, weights: EngineWeights) -> torch.Tensor:
    """Logits of a prefill, decode steps and a verify pass."""
    row = LAYER_ENGINES[engine]([model], [], weights)
    assert row.unsupported() == "" and row.install(unreported) == ""
    session = ModelSession(model)
    ends = [(80, 2), (81, 1), (90, 9)]
    logits = torch.cat([session.feed(CONTEXT[:end], keep=keep) for end, keep in ends])
    row.remove()
    return logits


UNREAD = ("cohere2", "phi", "stablelm")
FUSED, TIED = partial(tiny_model, "phi3"), partial(tiny_model, "qwen3")
UNTIED = partial(tiny_model, "llama with biases")


def unread(kind: str) -> Any:
    """A model that no engine has a forward pass of its own for."""
    windows = {"sliding_window": 11, "layer_types": SLIDING_FIRST} if kind == "cohere2" else {}
    config = CONFIG_MAPPING[kind](**COMMON | {"tie_word_embeddings": kind == "cohere2"} | windows)
    return randomized(build(AutoModelForCausalLM.from_config, config, 0))


CASES = [
    ("plain", FUSED, "float32", torch.float32),
    ("plain", TIED, "float32", torch.bfloat16),
    ("invariant", FUSED, "float32", torch.float32),
    ("invariant", TIED, "float32", torch.float32),
    ("invariant", UNTIED, "float32", torch.bfloat16),
    ("invariant", FUSED, "int8", torch.float32),
    ("invariant", UNTIED, "int4", torch.float32),
    ("invariant", UNTIED, "bfloat16", torch.float32),
    # PyTorch's own products may depend on where weights lie in memory.
    ("plain", partial(unread, "cohere2"), "float32", torch.float32),
    *(("invariant", partial(unread, kind), "float32", torch.float32) for kind in UNREAD),
    ("invariant", partial(unread, "cohere2"), "int8", torch.float32),
    ("invariant", partial(unread, "phi"), "float32", torch.bfloat16),
]


@pytest.mark.parametrize(("engine", "build", "kind", "dtype"), CASES)
def test_weights_in_files_give_the_bits_of_weights_in_memory(
    engine: str, build: Any, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    stored, weights = from_files(tmp_path, build().to(dtype), dtype), EngineWeights(kind)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    expected = computed(model, engine, weights)
    for _ in range(2):  # an engine that is removed can be installed again
        assert torch.equal(computed(stored, engine, weights), expected)
        assert in_files(stored)


@pytest.mark.parametrize(("engine", "kind"), [("plain", "float32"), ("invariant", "float32"), ("invariant", "int8")])
@pytest.mark.parametrize("build", [TIED, UNTIED, partial(tiny_model, "gemma3_text")])
def test_a_stored_format_is_converted_to_that_of_the_model(build: Any, engine: str, kind: str, tmp_path: Path) -> None:
    build().bfloat16().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    stored, expected = loaded(tmp_path), computed(model, engine, EngineWeights(kind))
    for _ in range(2):
        assert torch.equal(computed(stored, engine, EngineWeights(kind)), expected)


@torch.no_grad()
def test_a_tied_embedding_is_held_once(tmp_path: Path) -> None:
    model, ids = tiny_llama(vocab_size=90, tie_word_embeddings=True).bfloat16(), torch.tensor([[5, 89, 5], [0, 17, 16]])
    model.save_pretrained(tmp_path)
    stored, whole = loaded(tmp_path), model.get_input_embeddings().weight
    embedding = stored.get_input_embeddings()
    table, own = embedding.weight, 2 * whole.numel()
    layers = sum(part.nbytes for name, part in model.named_parameters() if "proj" in name)
    rest = tensor_bytes([stored]) - own  # norms and buffers
    assert 0 < rest < 0.2 * own
    for format, held in (("float32", -(-90 // 16) * 16 * whole.shape[1] * 2), ("int8", own)):
        engine = LAYER_ENGINES["invariant"]([stored], [], EngineWeights(format))
        need = engine.need()
        assert engine.install(unreported) == "" and (table.held is None) == (format == "float32")
        if format == "float32":
            assert engine.nbytes() == held + layers + rest
            assert need == layers, "the head takes the place of the embedding"
        assert torch.equal(embedding(ids), whole[ids].float())
        for part in (slice(3, None), slice(-20, 80, 7), torch.tensor([-1, 4]), torch.arange(90) % 3 == 0, -5):
            assert torch.equal(table[part], whole[part].float())
        assert torch.equal(table[ids[0]], whole[ids[0]].float()) and torch.equal(
            table @ table.T, whole.float() @ whole.float().T
        )
        engine.remove()
        assert torch.equal(table.held, whole), "the next engine begins with the values of the file"


def test_rows_of_a_packed_head_are_compared_with_its_file(tmp_path: Path) -> None:
    model = from_files(tmp_path, tiny_llama(vocab_size=96, tie_word_embeddings=True))
    table = model.get_input_embeddings().weight
    expected = table[3:20].clone()
    engine = LAYER_ENGINES["invariant"]([model], [], EngineWeights())
    engine.install(unreported)
    next(table.source.kernel.tensors()).zero_()  # as if packing were wrong
    assert torch.equal(table[3:20], expected) and not embedding_rows(model, 3, 20).any()


def embedding_rows(model: Any, start: int, end: int) -> torch.Tensor:
    rows: torch.Tensor = model.get_input_embeddings()(torch.arange(start, end))
    return rows


def test_a_drafter_shares_the_whole_head_of_a_target_in_plain_layers(tmp_path: Path) -> None:
    tiny_llama(vocab_size=96, tie_word_embeddings=True).bfloat16().save_pretrained(tmp_path)
    model = loaded(tmp_path)
    drafter = nn.Sequential(nn.Linear(8, 8, device="meta"))
    drafter[0].weight = nn.Parameter(model.get_output_embeddings().weight.detach(), requires_grad=False)
    engine = LAYER_ENGINES["plain"]([model], [drafter], EngineWeights())
    for _ in range(2):
        engine.install(unreported)
        weights = drafter[0].weight, model.get_output_embeddings().weight
        assert {type(weight) for weight in weights} == {nn.Parameter}
        assert weights[0].data_ptr() == weights[1].data_ptr(), "in memory once"
        engine.remove()
        assert type(drafter[0].weight) is RowTable and drafter[0].weight is not model.get_output_embeddings().weight


def test_rounded_weights_are_those_of_the_format_of_the_model(tmp_path: Path) -> None:
    """Files in float32 are first rounded to the model's bfloat16. The values of bfloat16 files need no conversion."""
    build = partial(tiny_model, "llama with biases")
    for stored, own in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        folder = tmp_path / str(own)
        build().to(stored).save_pretrained(folder)
        model, expected = loaded(folder, own), AutoModelForCausalLM.from_pretrained(folder, dtype=own)
        name, layer = next((name, part) for name, part in model.named_modules() if name.endswith("up_proj"))
        form = EngineWeights("int8").form(name, layer.weight, is_head=False)
        exact = EngineWeights("int8").form(name, expected.get_submodule(name).weight, is_head=False)
        assert isinstance(form, BlockWeight) and isinstance(exact, BlockWeight)
        assert torch.equal(form.values, exact.values) and torch.equal(form.scales, exact.scales)


@torch.no_grad()
def test_what_transformers_makes_of_a_file_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It may convert weights. The first layers of a class without a spec are compared with those that it loads."""
    model, load = unread("phi"), AutoModelForCausalLM.from_pretrained
    model.save_pretrained(tmp_path)

    def converted(*args: Any, **options: Any) -> Any:
        found = load(*args, **options)
        whole = found[0] if isinstance(found, tuple) else found
        whole.model.layers[0].self_attn.q_proj.weight.neg_()
        return found

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", converted)
    found = loaded(tmp_path, stays=False)
    own, stored = (part.model.layers[0].self_attn.q_proj.weight for part in (model, found))
    assert torch.equal(stored, -own)


def test_models_with_stored_buffers_are_loaded_whole(tmp_path: Path) -> None:
    unread("apertus").save_pretrained(tmp_path)
    loaded(tmp_path, stays=False)


def test_a_format_that_no_engine_computes_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    tiny_model("gemma2", attn_logit_softcapping=30.0).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    where = Placement("cpu", torch.float32, lambda text: None, engine_weights="int8")
    with pytest.raises(UserError, match="int8 engine weights are not possible"):
        load_model(Source(str(tmp_path), "capped"), "none", where)


@torch.no_grad()
def test_kernels_under_the_forward_pass_of_transformers_leave_the_embedding_as_it_is(tmp_path: Path) -> None:
    model = from_files(tmp_path, unread("cohere2").bfloat16())
    engine = LAYER_ENGINES["invariant"]([model], [], EngineWeights())
    assert engine.install(unreported) == "" and model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()
    assert isinstance(model.get_input_embeddings().weight, RowTable)
    engine.remove()
    assert in_files(model)


@torch.no_grad()
def test_the_forward_pass_of_transformers_reads_what_is_in_files(tmp_path: Path) -> None:
    model, ids = tiny_llama(vocab_size=96), torch.tensor([[5, 6, 7]])
    stored = from_files(tmp_path, model)
    assert tensor_bytes([stored]) < 0.5 * tensor_bytes([model])
    assert torch.equal(stored(ids).logits, model(ids).logits) and not in_files(stored)
    release([stored])
    assert in_files(stored) and torch.equal(stored(ids).logits, model(ids).logits)


def test_sessions_before_an_engine_read_no_weights(tmp_path: Path) -> None:
    """A model with sliding windows is checked with transformers' forward pass, for which all weights would be read."""
    model = from_files(tmp_path, tiny_model("gemma3_text"))
    ModelSession(model)
    assert in_files(model)
    engine = LAYER_ENGINES["plain"]([model], [], EngineWeights())
    engine.install(unreported)
    assert model not in sliding_window._keeps_all
    ModelSession(model)
    assert sliding_window._keeps_all[model] is False


def test_models_that_share_a_placeholder_share_its_weight(tmp_path: Path) -> None:
    model = from_files(tmp_path, tiny_llama(vocab_size=96))
    cut = first_layers(model, 1)
    layers = model.model.layers[0].mlp.up_proj, cut.model.layers[0].mlp.up_proj
    assert layers[0] is not layers[1] and layers[0].weight is layers[1].weight
    fill([model, cut])
    assert layers[0].weight is layers[1].weight and not layers[0].weight.is_meta
    release([model, cut])
    assert layers[0].weight is layers[1].weight and source_of(layers[0].weight) is not None


def test_engines_say_how_much_memory_they_need_for_weights_in_files(tmp_path: Path) -> None:
    model = tiny_llama(hidden_size=64, intermediate_size=256)
    linears = {id(part.weight): part.weight.nbytes for part in model.modules() if isinstance(part, nn.Linear)}
    stored, total = from_files(tmp_path, model), sum(linears.values())
    head = model.lm_head.weight.nbytes  # which is in memory
    rows = [("plain", "float32"), ("invariant", "float32"), ("invariant", "bfloat16"), ("invariant", "int8")]
    needs = {(name, kind): LAYER_ENGINES[name]([stored], [], EngineWeights(kind)).need() for name, kind in rows}
    assert needs["plain", "float32"] == needs["invariant", "float32"] == total - head
    assert needs["invariant", "bfloat16"] == total / 2 - head
    assert needs["invariant", "int8"] == pytest.approx(total / 4 - head, rel=0.05)


def change(path: Path) -> None:
    """Negate the values of a weight. Size and time of the file stay."""
    overwrite(path, changed_bytes(path, "model.layers.1.self_attn.o_proj.weight"))


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("what", [change, remove])
@pytest.mark.parametrize("engine", ["plain", "invariant"])
def test_a_file_that_changed_after_loading_is_an_error(engine: str, what: Any, tmp_path: Path) -> None:
    model = from_files(tmp_path, tiny_llama(vocab_size=96))
    started = Engine([model])
    what(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="has changed since it was loaded"):
        started.use(engine, 1)
    assert started.state.kind == "plain" and not started.state.verified
    with pytest.raises(UserError, match="has changed since it was loaded"):
        model(torch.tensor([[5, 6, 7]]))


def started(folder: Path, results: ResultFile, kind: str, weights: str) -> Pair:
    pair = load(folder, engine_weights=weights)
    pair.engine.results = results
    assert pair.engine.use(kind, 1).verified
    return pair


def logits(pair: Pair) -> torch.Tensor:
    return ModelSession(pair.target).feed(CONTEXT[:20], keep=3)


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_weights_that_were_overwritten_in_place_are_those_of_the_next_start(
    weights: str, tmp_path: Path, file: ResultFile, own_cache: Path
) -> None:
    """Results that were stored for the former weights are not used. A head is negated: many digests do not see that."""
    folder = save_folder(tmp_path / "model", tiny_llama(vocab_size=300), tiny_tokenizer())
    first = logits(started(folder, file, "invariant", weights))
    again = started(folder, file, "invariant", weights)
    assert again.engine.state.tested_on and torch.equal(logits(again), first)
    change(folder / "model.safetensors")
    changed = started(folder, file, "invariant", weights)
    model = tiny_llama(vocab_size=300)
    model.model.layers[1].self_attn.o_proj.weight.data.neg_()
    engine = LAYER_ENGINES["invariant"]([model], [], EngineWeights(weights))
    assert engine.install(unreported) == ""
    expected = ModelSession(model).feed(CONTEXT[:20], keep=3)
    assert torch.equal(logits(changed), expected) and not torch.allclose(expected, first, atol=1e-2)
    assert not changed.engine.state.tested_on


@pytest.mark.parametrize("weights", [pytest.param("float32", marks=pytest.mark.full), "gguf"])
def test_a_gguf_file_that_was_replaced_is_noticed(
    weights: str, tmp_path: Path, file: ResultFile, own_cache: Path
) -> None:
    path = write_wide_gguf(tmp_path / "model.gguf")
    other = write_wide_gguf_of(tmp_path / "other.gguf", seed=1)
    pair = started(path, file, "invariant", weights)
    first = logits(pair)
    assert torch.equal(logits(started(path, file, "invariant", weights)), first)
    overwrite(path, other.read_bytes())
    if weights == "gguf":
        with pytest.raises(UserError, match="has changed since it was loaded"):
            pair.engine.use("invariant", 1)
    changed = started(path, file, "invariant", weights)
    expected = logits(started(other, file, "invariant", weights))
    assert torch.equal(logits(changed), expected) and not torch.allclose(expected, first, atol=1e-2)
    assert not changed.engine.state.tested_on
