"""The engine's self-test: which errors it notices, what it tests, and when it runs again."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Screen, checked, open_session, tiny_pair
from fixed_speeds import only_engines, prefer
from tiny import tiny_llama

from utils.decode.engine_forward import MAX_WIDTH
from utils.decode.layer_cut import first_layers
from utils.engine import Engine, attention, compiled_products, invariant, product_code, selftest
from utils.engine.compiled_decoder import DecoderProgram
from utils.engine.compiled_products import CompiledKernel
from utils.engine.machine_code import Code
from utils.engine.module_swap import EngineLinear
from utils.engine.weight_format import EngineWeights
from utils.errors import UserError
from utils.repl.repl_session import Verdict

llama = partial(tiny_llama, vocab_size=96)


@pytest.fixture(autouse=True)
def _invariant_is_fastest() -> None:
    prefer("invariant")


def break_rows(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an error that shows only at one verify width, or in every logit ("scale")."""
    product, join = CompiledKernel.__call__, torch.cat
    add_attention = DecoderProgram._add_attention
    if part == "head":
        monkeypatch.setattr(CompiledKernel, "__call__", lambda self, x: product(self, x) * (1 + 1e-6 * (len(x) == 6)))
    elif part == "products":  # machine code for six rows that rounds twice where others round once
        write = product_code._Tile.write

        def write_odd(self: Any) -> Any:
            with monkeypatch.context() as patch:
                if self._rows == 6:
                    patch.setattr(Code, "multiply_add", lambda self, x, y, z: self.fadd(self.fmul(x, y), z))
                return write(self)

        monkeypatch.setattr(product_code._Tile, "write", write_odd)
        monkeypatch.setattr(compiled_products, "product_functions", cache(product_code.product_functions.__wrapped__))
    elif part == "layers":  # attention of machine code

        def add_odd(self: DecoderProgram, layer: Any) -> None:
            add_attention(self, replace(layer, scaling=layer.scaling * (1 + 1e-6 * (self._count == 7))))

        monkeypatch.setattr(DecoderProgram, "_add_attention", add_odd)
    elif part == "attention":
        monkeypatch.setattr(
            attention.torch, "cat", lambda rows, dim=0: join(rows, dim) * (1 + 1e-6 * (dim == 1 and len(rows) == 7))
        )
    else:
        monkeypatch.setattr(CompiledKernel, "__call__", lambda self, x: product(self, x) * 1.01)


ERRORS = [
    ("head", r"\b6 tokens", True),
    ("products", r"\b6 tokens", True),
    ("products", r"\b6 tokens", False),
    ("layers", r"\b7 tokens", True),
    ("attention", r"\b7 tokens", False),
    ("scale", selftest.DIFFERENT_LOGITS, True),
]


@pytest.mark.parametrize(("part", "reason", "lean"), ERRORS)
def test_the_self_test_notices_an_error(part: str, reason: str, lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    only_engines(monkeypatch, "plain", "invariant")
    break_rows(part, monkeypatch)
    if not lean:  # transformers' forward over the same kernels
        monkeypatch.setattr(invariant, "read_decoder", lambda model: "its family is not known")
    model = llama()
    engine = Engine([model])
    with pytest.raises(UserError, match=reason):
        engine.use("invariant", 1)
    state = engine.use("auto", 1)
    assert (state.kind, state.verified) == ("plain", False)
    assert not any(isinstance(part, EngineLinear) for part in model.modules())


def recorded_tests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool, bool]]:
    """The model, whether the first layer was tested, and `complete` of each self-test, which passes."""
    tested: list[tuple[Any, bool, bool]] = []

    def record(model: Any, widths: Any, count: int, *, complete: bool, report: Any) -> str:
        assert widths in (selftest.TILED_WIDTHS, ())
        tested.append((model, bool(widths), complete))
        return ""

    monkeypatch.setattr(selftest, "width_dependence", record)
    return tested


def test_the_first_layer_of_a_separate_drafter_is_tested_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tested, target = recorded_tests(monkeypatch), tiny_llama()
    for drafter, first_layer in ((tiny_llama(seed=1), True), (first_layers(target, 1), False)):
        tested.clear()
        engine = Engine([target, drafter])
        engine.use("invariant", 1)
        assert tested == [(target, True, False), (drafter, first_layer, False)]
        tested.clear()
        engine.test("invariant", 1)
        assert tested == [(target, True, True), (drafter, first_layer, True)]
        engine.use("plain", 1)


@pytest.mark.parametrize("complete", [False, True])
def test_the_first_layer_is_tested_at_every_width_and_the_model_at_a_few(complete: bool) -> None:
    model, texts = llama(num_hidden_layers=3), list[str]()
    engine = invariant.InvariantEngine([model], [], EngineWeights())
    assert engine.install() == ""
    assert selftest.width_dependence(model, selftest.EVERY_WIDTH, 1, complete=complete, report=texts.append) == ""
    every = [f"testing the engine: a verify pass of {width} tokens, 1 thread" for width in range(2, MAX_WIDTH + 1)]
    few = [every[width - 2] for width in (selftest.WIDTHS if complete else selftest.START_WIDTHS)]
    prefill = "testing the engine: a prefill, 1 thread"
    assert texts == [*every, prefill, *few, prefill]


@pytest.mark.parametrize("complete", [False, True])
def test_the_first_outputs_of_the_head_are_tested_at_every_width(
    complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A complete test has all of them, as have the passes of whole models."""
    monkeypatch.setattr(selftest, "TESTED_HEAD", 40)
    model, sizes = llama(num_hidden_layers=3), dict[int, set[int]]()
    engine = invariant.InvariantEngine([model], [], EngineWeights())
    assert engine.install() == ""
    dependence = selftest._dependence

    def recorded(part: Any, *arguments: Any) -> str:
        size = sizes.setdefault(part.config.num_hidden_layers, set())
        feed = selftest.ModelSession.feed
        with monkeypatch.context() as patch:
            patch.setattr(
                selftest.ModelSession,
                "feed",
                lambda *own, keep: [logits := feed(*own, keep=keep), size.add(logits.shape[1])][0],
            )
            return dependence(part, *arguments)

    monkeypatch.setattr(selftest, "_dependence", recorded)
    assert engine.self_test(1, extent="complete" if complete else "first") == ""
    assert sizes == {1: {96 if complete else 40}, 3: {96}}
    assert model(torch.zeros((1, 1), dtype=torch.long)).logits.shape[2] == 96


@pytest.mark.parametrize("feature", ["avx2", "avx512f"])
@pytest.mark.parametrize("rounded", [0, 64])
@pytest.mark.parametrize("blocks", [1, 4, 1000])
def test_the_widths_of_a_start_use_every_tile_of_products(
    feature: str, rounded: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tiles that follow each other, and as the last one."""
    monkeypatch.setattr(product_code, "cpu_features", lambda: frozenset({feature}))
    form = product_code.PackedForm("int8" if rounded else "bfloat16", rounded)

    def tiles(widths: Any) -> set[tuple[int, int, bool]]:
        found = set()
        for width in widths:
            size, at_once = product_code.tile_of(form, width, blocks)
            found |= {(at_once, min(size, width - first), first + size >= width) for first in range(0, width, size)}
        return found

    every = tiles((1, *selftest.EVERY_WIDTH))
    assert tiles((1, *selftest.TILED_WIDTHS)) == every
    rows = {shape.blocks: shape.rows for shape in product_code.tile_shapes(form)}
    assert all(size in rows[at_once] for at_once, size, _ in every)


@pytest.mark.parametrize("wrong", ["target", "drafter"])
def test_logits_of_the_first_layers_are_compared_with_transformers(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each model with weights of its own; the error is in an engine, so that the reference does not have it."""
    target, drafter = llama(), llama(seed=1)
    install = invariant.swap_linears

    def broken(models: Any, *arguments: Any) -> None:
        install(models, *arguments)
        norm = (target if wrong == "target" else drafter).model.layers[1].post_attention_layernorm
        norm.weight = torch.nn.Parameter(norm.weight * 1.01, requires_grad=False)

    monkeypatch.setattr(invariant, "swap_linears", broken)
    monkeypatch.setattr(invariant, "read_decoder", lambda model: "its family is not known")
    with pytest.raises(UserError, match=selftest.DIFFERENT_LOGITS):
        Engine([target, drafter]).use("invariant", 1)


@pytest.mark.parametrize(
    ("factor", "accepted", "passed"), [(1.0, True, False), (1.0, True, True), (1.3, False, False), (3.0, False, True)]
)
def test_rounded_weights_may_differ_a_little_from_the_reference(
    factor: float, accepted: bool, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong weight changes far more. passed: at a later start, which compares a part of the head."""
    monkeypatch.setattr(selftest, "TESTED_HEAD", 40)
    model, weights = llama(hidden_size=64), EngineWeights("int8")
    reference = selftest.Reference.of(model, weights, passed=passed)
    assert reference.logits.shape == (selftest.POSITIONS, 40 if passed else 96)
    engine = invariant.InvariantEngine([model], [], weights)
    assert engine.install() == ""
    model.model.layers[0].mlp.down_proj.kernel._packed["scales"].mul_(factor)
    assert (reference.difference() == "") is accepted


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_the_reference_unpacks_a_few_rows_of_the_head_at_a_time(
    weights: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama(hidden_size=64)
    if bias:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(96), requires_grad=False)
    whole, rows = selftest.Reference.of(model, EngineWeights(weights)), list[int]()
    product = torch.nn.functional.linear

    def recorded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows.append(len(weight))
        return product(x, weight, bias)

    monkeypatch.setattr(selftest, "TESTED_HEAD", 40)
    monkeypatch.setattr(selftest, "linear", recorded)
    found = selftest.Reference.of(model, EngineWeights(weights))
    assert rows == [40, 40, 16]
    assert torch.allclose(found.logits, whole.logits, rtol=1e-5, atol=1e-5)


def test_the_self_test_runs_again_on_request(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_engines(monkeypatch, "plain", "invariant")
    file, pair = tmp_path / "runs.jsonl", tiny_pair()
    session = open_session(view, pair, records=file)
    checked(session, file, "/engine auto", "/threads 1", "/length 5", "Hello there")
    costs = session.settings.costs
    with monkeypatch.context() as broken:
        break_rows("head", broken)
        assert session.handle("/engine test") is Verdict.DONE
    assert (pair.engine.state.kind, pair.engine.state.verified) == ("plain", False)
    assert pair.engine.state.sentence() in view.take()[1] and session.settings.costs == costs
    record = checked(session, file, "/engine test", "Hello there")
    assert record["engine"]["verified"] and record["settings"]["engine"] == "auto"
