"""The CUDA graph engine as a row of the table: what it supports, promises, notices and leaves behind."""

from random import Random
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from fake_graph import FakeGraph, FakeRecorder
from fixed_speeds import only_engines, prefer
from graphs_on_cpu import MODELS, OnCpu, attached, equal, ids, installed, replays
from tiny import tiny_llama, tiny_mamba, tiny_t5
from torch import Tensor

from utils.decode.engine_forward import MAX_WIDTH, prepare_run
from utils.decode.layer_cut import first_layers
from utils.decode.model_session import ModelSession
from utils.engine import Engine, cuda_graph, graph_cache, graph_decoder, selftest
from utils.engine.cuda_graph import CudaGraphEngine
from utils.engine.engine import LAYER_ENGINES
from utils.engine.invariant import InvariantEngine
from utils.engine.layer_engine import BIT_IDENTICAL, NO_PROMISE, install_with_fallback
from utils.engine.weight_format import EngineWeights
from utils.errors import UserError


def test_a_cut_of_the_model_has_graphs_of_its_own() -> None:
    plain, model, random = MODELS["llama"](), MODELS["llama"](), Random(7)
    engine, context = installed(model), ids(20, random)
    cuts = [first_layers(each, 1) for each in (plain, model)]

    def logits(cut: Any) -> Tensor:
        session = ModelSession(cut)
        return torch.cat([session.feed(context[:end], keep=1) for end in (12, 13, 16)])

    assert equal(logits(cuts[1]), logits(cuts[0]))
    assert replays(cuts[1])
    engine.remove()
    assert "forward" not in vars(model)
    assert equal(logits(cuts[1]), logits(cuts[0]))


def test_a_cut_of_a_model_with_hooks_runs_only_its_own_layers() -> None:
    """accelerate sets the forward pass of quantized models on the instance."""
    model, context = MODELS["llama"](), torch.tensor([[5, 6, 7]])
    expected = first_layers(model, 1)(context).logits
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
    assert torch.equal(first_layers(model, 1)(context).logits, expected)
    before = vars(model)["forward"]
    installed(model).remove()
    assert vars(model)["forward"] is before


def test_promise_is_made_only_if_the_bits_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"]()
    monkeypatch.setattr(cuda_graph, "_has_equal_bits", lambda model: True)
    engine = installed(model)
    assert engine.promise == BIT_IDENTICAL
    engine.remove()
    monkeypatch.undo()
    assert installed(model).promise == ""  # PyTorch's own kernels round differently at other widths


@pytest.mark.parametrize("odd", [None, 5, 12, 33, "a prompt", "2 times", "4 times", "another width of a layer"])
def test_bits_are_compared_at_every_width_and_in_longer_buffers(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = attached(MODELS["llama"]())

    def logits(model: Any, count: int, width: int) -> Tensor:
        factor = model.forward.pool.take(1).capacity // graph_cache.SMALLEST
        kind = width if factor == 1 else f"{factor} times"
        return torch.full((count, 2), float(kind == odd))

    monkeypatch.setattr(cuda_graph, "_logits", logits)
    monkeypatch.setattr(cuda_graph, "_prompt_logits", lambda *_: torch.full((3, 2), float(odd == "a prompt")))
    monkeypatch.setattr(selftest, "width_dependence", lambda *_: odd if odd == "another width of a layer" else "")
    assert cuda_graph._has_equal_bits(model) is (odd is None)


def test_a_prompt_has_the_rows_of_single_steps() -> None:
    model = attached(MODELS["llama"]().double())
    for length in (30, MAX_WIDTH):
        alone = cuda_graph._logits(model, length, 1)
        prompt = cuda_graph._prompt_logits(model, length, len(alone))
        assert len(prompt) == length - selftest.PREFIX and torch.allclose(prompt, alone[: len(prompt)])


def skewed(graph: FakeGraph, width: int) -> None:
    """Let a graph of one width return logits that are two percent off."""
    replay = FakeGraph.replay

    def replay_wrongly() -> None:
        replay(graph)
        if graph.outputs[0].shape[1] == width:
            graph.outputs[0].mul_(1.02)

    graph.replay = replay_wrongly  # type: ignore[method-assign]


@pytest.mark.parametrize("width", [1, 6, 17])
def test_the_self_test_notices_wrong_logits_of_one_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(self: FakeRecorder, run: Any) -> FakeGraph:
        graph = FakeGraph(run)
        skewed(graph, width)
        return graph

    monkeypatch.setattr(FakeRecorder, "__call__", record)
    engine = OnCpu([MODELS["llama"]()], [], EngineWeights())
    assert f"passes of {12 if width == 17 else width} tokens" in engine.install()


def test_the_self_test_notices_wrong_attention_over_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    right = graph_decoder._attended_by_products

    def wrong(query: Tensor, pair: Tensor, *rest: Any) -> Tensor:
        return right(query * (1 if pair.shape[2] < 4 * graph_cache.SMALLEST else 1.3), pair, *rest)

    monkeypatch.setattr(graph_decoder, "_attended_by_products", wrong)
    engine = OnCpu([MODELS["llama"]()], [], EngineWeights())
    said: list[str] = []
    assert install_with_fallback(engine, said.append) == "" and not engine.has_own_forward
    assert any("in long buffers" in text for text in said)


def test_a_prepared_run_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where keys move to a longer slot, in passes with hidden states, and in a cut."""
    monkeypatch.setattr(graph_cache, "SMALLEST", 32)
    model, random = MODELS["llama"](), Random(3)
    installed(model)
    context = ids(90, random)
    cut = first_layers(model, 1)

    def run(last: int) -> None:
        for each, layers in ((model, ()), (model, (0, 2)), (cut, ())):
            session = ModelSession(each, features=layers)
            for end in range(20, last + 1, 7):
                session.feed(context[:end], keep=1)
                session.feed(context[: end + 3], keep=3)
                session.rewind(end)
            if last > 27 and each is model:
                session.feed(context[: last + 5], keep=5)  # no earlier run had such a pass with hidden states

    run(27)
    recorded = model.forward._record.graphs
    before = len(recorded)
    prepare_run((model, None), 20, 88)
    prepared = len(recorded)
    run(83)
    assert before < prepared == len(recorded) and replays(model) > 30
    prepare_run((model, None), 20, 88)
    assert len(recorded) == prepared


def test_auto_chooses_it_where_it_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Engine([MODELS["llama"]()]).problems["cuda_graph"]  # on a CPU
    only_engines(monkeypatch, "plain")
    monkeypatch.setitem(LAYER_ENGINES, "cuda_graph", OnCpu)
    prefer("cuda_graph")
    model = MODELS["llama"]()
    engine = Engine([model])
    state = engine.use("auto", 1)
    assert (state.kind, state.verified) == ("cuda_graph", False)
    assert engine.use("plain", 1).kind == "plain" and "forward" not in vars(model)


def test_a_promise_of_a_few_layers_that_the_whole_model_does_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"]()
    monkeypatch.setattr(cuda_graph, "_has_equal_bits", lambda other: other is not model)
    only_engines(monkeypatch, "plain")
    monkeypatch.setitem(LAYER_ENGINES, "cuda_graph", OnCpu)
    prefer("cuda_graph")
    state = Engine([model]).use("auto", 1)
    assert (state.kind, state.verified, state.reason) == ("cuda_graph", False, NO_PROMISE)


def test_the_invariant_engine_is_for_models_on_a_cpu() -> None:
    assert "needs a model on cpu" in InvariantEngine([tiny_llama().to("meta")], [], EngineWeights()).unsupported()


def test_an_engine_that_fails_leaves_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYER_ENGINES, "cuda_graph", OnCpu)

    def refuse(self: FakeRecorder, run: Any) -> FakeGraph:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(FakeRecorder, "__call__", refuse)
    model = MODELS["llama"]()
    engine = Engine([model])
    with pytest.raises(UserError, match="not permitted when stream is capturing"):
        engine.use("cuda_graph", 1)
    assert engine.state.kind == "plain" and "forward" not in vars(model)


UNSUPPORTED = [(tiny_t5, "encoder-decoder"), (tiny_mamba, "neither full nor sliding"), (tiny_llama, "one is on cpu")]


@pytest.mark.parametrize(("model", "reason"), UNSUPPORTED)
def test_unsupported_models_are_named(model: Any, reason: str) -> None:
    engine_class = CudaGraphEngine if model is tiny_llama else OnCpu
    assert reason in engine_class([model()], [], EngineWeights()).unsupported()
    assert "int8" in OnCpu([tiny_llama()], [], EngineWeights("int8")).unsupported()
