"""The openvino engine: what it needs of a machine, what it holds, and models that share weights."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from tiny import tiny_llama

from utils.decode.engine_forward import engine_forward
from utils.decode.layer_cut import first_layers
from utils.decode.model_session import ModelSession
from utils.engine import machine, openvino_engine, openvino_segments, selftest
from utils.engine.lean_decoder import LeanDecoder
from utils.engine.openvino_engine import OpenVinoEngine, unsupported
from utils.engine.selftest import read_weights
from utils.engine.weight_format import EngineWeights

RUNS_HERE = pytest.mark.skipif(bool(unsupported("float32")), reason="OpenVINO is not installed")
CONTEXT = [5 * index % 64 for index in range(30)]


def logits(model: Any) -> torch.Tensor:
    return ModelSession(model).feed(CONTEXT, keep=4)


@RUNS_HERE
def test_a_drafter_of_the_first_layers_is_computed_by_the_graphs_of_the_target() -> None:
    target = tiny_llama(num_hidden_layers=3)
    for drafter, parts in ((first_layers(target, 1), 1), (tiny_llama(1), 2)):
        expected = [logits(model) for model in (target, drafter)]
        engine = OpenVinoEngine([target, drafter], [], EngineWeights())
        assert engine.install([1]) == "" and len(engine._segments) == parts
        for model, exact in zip((target, drafter), expected, strict=True):
            assert engine_forward(model) is not None and torch.allclose(logits(model), exact, atol=1e-4)
        engine.remove()
        assert not any("forward" in vars(model) for model in (target, drafter))


@RUNS_HERE
@pytest.mark.parametrize("name", [name for name in ("float32", "int8", "int4") if not unsupported(name)])
def test_passes_of_every_number_of_rows_have_all_weights(name: str) -> None:
    """Without VNNI, OpenVINO packs weights of this size twice, for few rows and for more than eleven."""
    sizes = {"hidden_size": 960, "intermediate_size": 1024, "num_attention_heads": 15, "num_key_value_heads": 5}
    model = tiny_llama(**sizes, num_hidden_layers=1, max_position_embeddings=1024, initializer_range=0.02)
    weights = EngineWeights(name)
    exact = deepcopy(model)
    read_weights(exact, weights)
    engine = OpenVinoEngine([model], [], weights)
    assert engine.install([1]) == ""
    for count in (1, 2, 8, 12, 48, 65, 129, 500):
        ids = [5 * index % 64 for index in range(count + 3)]
        ours, reference = (ModelSession(part).feed(ids, keep=3) for part in (model, exact))
        assert (ours - reference).norm() <= 0.1 * reference.norm(), count
        if 3 <= count <= 65:
            session = ModelSession(model)
            session.feed(ids[:3], keep=1)
            assert (session.feed(ids, keep=count)[-3:] - reference).norm() <= 0.1 * reference.norm(), count


@RUNS_HERE
def test_numbers_of_rows_that_pack_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a whole layer and for the output head, and not again by a later engine with the same number of threads."""
    found, find = list[tuple[int, ...]](), openvino_segments.rows_that_pack

    def counted(made: Any, sizes: Any) -> Any:
        found.append(sizes)
        return find(made, sizes)

    monkeypatch.setattr(openvino_segments, "rows_that_pack", counted)
    model = tiny_llama(num_hidden_layers=3, vocab_size=104)
    first, later = (OpenVinoEngine([model], [], EngineWeights()) for _ in range(2))
    assert first.install([1]) == ""
    assert found == [openvino_segments.ALL_ROWS, openvino_segments.BOUND_ROWS]
    first.remove()
    later.layouts |= first.layouts
    assert later.install([1]) == "" and len(found) == 2
    later.set_threads(2 if torch.get_num_threads() == 1 else 1)
    assert len(found) == 4


@RUNS_HERE
def test_the_first_layer_is_tested_at_every_number_of_rows_of_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, rows = list[str](), [rows for rows in openvino_segments.BOUND_ROWS if rows > 1]
    model = tiny_llama()
    engine = OpenVinoEngine([model], [], EngineWeights())
    assert engine.install([1]) == "" and engine.self_test(1, texts.append) == ""
    widths = [*rows, *selftest.START_WIDTHS]
    assert [int(text.split()[7]) for text in texts if "verify" in text] == widths
    texts.clear()
    with monkeypatch.context() as patch:  # a form of attention that was not tested alone
        patch.setattr(LeanDecoder, "has_tested_attention", False)
        assert engine.self_test(1, texts.append) == ""
    widths = [*selftest.EVERY_WIDTH, *selftest.START_WIDTHS]
    assert [int(text.split()[7]) for text in texts if "verify" in text] == widths
    texts.clear()
    assert engine.self_test(1, texts.append, complete=True) == ""
    widths = [*selftest.EVERY_WIDTH, *selftest.WIDTHS]
    assert [int(text.split()[7]) for text in texts if "verify" in text] == widths


@RUNS_HERE
def test_the_memory_that_it_needs_is_that_of_its_graphs() -> None:
    model = tiny_llama(hidden_size=128, intermediate_size=256)
    formats = [name for name in ("float32", "bfloat16", "int8", "int4") if not unsupported(name)]
    for name in formats:
        engine = OpenVinoEngine([model], [], EngineWeights(name))
        if engine.unsupported() or engine.weights != name:
            continue
        assert engine.install([1]) == ""
        held = sum(part.nbytes() for part in engine._segments)
        engine.remove()
        assert 0.9 * engine.need() <= held <= 1.25 * engine.need(), name


@pytest.mark.parametrize(
    ("limit", "refused"),
    [
        ("AVX2", {"int8", "int4", "gguf", "bfloat16"}),
        ("avx2_vnni", {"bfloat16"}),
        ("AVX512_CORE", set()),
        ("DEFAULT", set()),
    ],
)
@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_formats_whose_instructions_are_turned_off_are_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, limit: str, refused: set[str]
) -> None:
    has_features(monkeypatch, "avx512_bf16", "avx512_vnni")
    monkeypatch.setenv(variable, limit)
    assert {name for name in ("float32", "int8", "int4", "gguf", "bfloat16") if unsupported(name)} == refused


def test_formats_need_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    integers = ("int8", "int4", "gguf")
    has_features(monkeypatch, "avx", "fma")
    assert unsupported("float32") == ""
    assert unsupported("int8") == "int8 weights need a processor with avx2 or avx512_vnni or avx_vnni"
    has_features(monkeypatch, "avx2", "fma")
    assert [not unsupported(name) for name in (*integers, "bfloat16")] == [True, True, True, False]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # what the processor has anyway
    assert not any(map(unsupported, integers))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX")
    assert all(map(unsupported, integers))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    has_features(monkeypatch, "avx2", "avx_vnni")
    assert [not unsupported(name) for name in (*integers, "bfloat16")] == [True, True, True, False]
    monkeypatch.setattr(openvino_engine, "find_spec", lambda name: None)
    assert unsupported("float32") == "the package openvino is not installed"


def has_features(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the processor have these instruction sets."""
    for module in (machine, openvino_engine):
        monkeypatch.setattr(module, "cpu_features", lambda: list(names))
