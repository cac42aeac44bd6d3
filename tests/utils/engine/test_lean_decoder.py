"""The lean forward: hidden states, arguments that are left to transformers, and prefills whatever rows follow."""

import sys
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from decoder_families import tiny_model
from paths import BENCHMARKS
from torch import Tensor
from transformers import DynamicCache

from utils.decode import model_session
from utils.decode.engine_forward import MAX_WIDTH, engine_forward
from utils.decode.layer_cut import first_layers
from utils.decode.model_session import ModelSession
from utils.engine import Engine, lean_decoder
from utils.engine.compiled_products import CompiledKernel
from utils.engine.engine import AS_LOADED
from utils.engine.invariant import InvariantEngine
from utils.engine.module_swap import EngineLinear
from utils.engine.weight_format import EngineWeights

sys.path.append(str(BENCHMARKS))

from probes import run_products

IDS = [(7 * index + 3) % 150 for index in range(120)]


@cache
def lean_model(name: str = "qwen3") -> Any:
    """Tests leave it as it is."""
    model = tiny_model(name)
    assert Engine([model]).use("invariant", 1).verified and engine_forward(model)
    return model


@torch.no_grad()
def test_the_hidden_states_are_those_of_transformers() -> None:
    plain, lean, ids = tiny_model("qwen3"), lean_model(), torch.tensor([IDS[:20], IDS[30:50]])
    expected, found = (model(input_ids=ids, output_hidden_states=True).hidden_states for model in (plain, lean))
    lean(input_ids=ids.flip(0), output_hidden_states=True)  # overwrites its buffers
    assert len(found) == len(expected)
    assert all(torch.allclose(own, other, atol=1e-4) for own, other in zip(found, expected, strict=True))


@torch.no_grad()
def test_a_padded_batch_is_left_to_transformers() -> None:
    ids, mask = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    arguments = {"input_ids": ids, "attention_mask": mask}
    expected, found = (model(**arguments).logits for model in (tiny_model("qwen3"), lean_model()))
    assert torch.allclose(found[0, 2:], expected[0, 2:], atol=1e-4) and torch.allclose(found[1], expected[1], atol=1e-4)


@torch.no_grad()
def test_other_kinds_of_output_are_left_to_transformers() -> None:
    plain, lean, ids = tiny_model("qwen3"), lean_model(), torch.tensor([IDS[:20]])
    chosen = {"input_ids": ids, "logits_to_keep": torch.tensor([3, 11])}
    assert torch.allclose(lean(**chosen).logits, plain(**chosen).logits, atol=1e-4)
    assert isinstance(lean(input_ids=ids, return_dict=False), tuple)


@torch.no_grad()
def test_a_call_that_is_left_to_transformers_computes_with_the_weights_of_the_engine() -> None:
    model, ids = tiny_model("qwen3"), torch.tensor([IDS[:20]])
    InvariantEngine([model], [], EngineWeights("int8")).install()
    rounded, left = model(input_ids=ids).logits, model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    plain = tiny_model("qwen3")(input_ids=ids).logits
    assert torch.allclose(left, rounded, atol=1e-3) and not torch.allclose(plain, rounded, atol=5e-3)


def rows_after(model: Any, keep: int) -> Tensor:
    """Logits of the last row of a context whose last `keep` rows are fed with it in one call."""
    context = IDS[: 100 + keep]
    return ModelSession(model).feed(context, keep)[:1]


@pytest.mark.parametrize("keep", [2, 5, 20])
def test_the_prefill_of_a_long_prompt_does_not_depend_on_the_rows_that_follow(keep: int) -> None:
    model = lean_model()
    alone = ModelSession(model)
    alone.read(IDS[:101])
    assert torch.equal(rows_after(model, keep), alone.feed(IDS[:101], keep=1))


@pytest.mark.parametrize("features", [(), (2, 0, 1), (1, -1), (1, -1, 4), (4,)])  # 4: before the final norm
@pytest.mark.parametrize("length", [97, 118])  # of the last chunk: 1 row, 22 rows
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_a_prefill_in_chunks_has_the_logits_and_states_of_transformers(
    name: str, length: int, features: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_session, "PREFILL_CHUNK", 48)
    lean, context = lean_model(name), IDS[:length] + [9, 8]
    own, other = (ModelSession(model, features=features) for model in (lean, tiny_model(name)))
    rows = [context, context[::-1]]
    found, expected = (session.feed_rows(rows, keep=2) for session in (own, other))
    assert torch.allclose(found, expected, atol=1e-4)
    states, reference = own.take_features(), other.take_features()
    assert states is reference is None or torch.allclose(states, reference, atol=1e-4)  # of the first sequence


def test_programs_of_verify_passes_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building one takes as long as a quarter of a pass, and a run uses many widths, with and without states."""
    built, models, make = list[tuple[int, int]](), [tiny_model("llama")], lean_decoder.DecoderProgram
    monkeypatch.setattr(
        lean_decoder,
        "DecoderProgram",
        lambda *args, **kind: (built.append((kind["count"], len(kind["kept"]))), make(*args, **kind))[1],
    )
    InvariantEngine(models, [], AS_LOADED).install()
    for features in ((), (1,)):
        ModelSession(models[0], features=features).feed(IDS[:17], keep=17)  # makes the buffers
    built.clear()
    for run in range(2):
        for features in ((), (1,)):
            session = ModelSession(models[0], features=features)
            session.begin(IDS[:20])
            session.feed(IDS[: 20 + run], keep=1)  # another prompt
            for width in range(1, 17):
                session.rewind(20)
                session.feed(IDS[: 20 + width], keep=width)
    widths = [key for key in built if key[0] < 17]
    assert len(widths) == len(set(widths)) == 2 * 16


def test_programs_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_decoder, "PROGRAMS", 3)
    model = tiny_model("llama")
    InvariantEngine([model], [], AS_LOADED).install()
    session = ModelSession(model)
    for end in (6, 7, 9, 10, 13, 14, 18, 19):  # widths 6, 1, 2, 1, 3, 1, 4, 1
        session.feed(IDS[:end], keep=1)
    assert [count for _, count, _ in vars(model)["forward"]._programs] == [3, 4, 1]


def test_programs_of_all_widths_share_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_decoder, "PREFILL_CHUNK", 24)
    model, plain = tiny_model("qwen3"), ModelSession(tiny_model("qwen3"), features=(1,))
    InvariantEngine([model], [], AS_LOADED).install()
    forward, session = vars(model)["forward"], ModelSession(model, features=(1,))
    for width in (1, 3, 20, 30, 2, 5):  # 30: larger buffers
        first, end = session._cached, session._cached + width
        found, expected = (own.feed(IDS[:end], keep=width) for own in (session, plain))
        assert torch.allclose(found, expected, atol=1e-4), first
        buffers = forward._buffers
        assert {program.qkv.data_ptr() for program in forward._programs.values()} == {buffers.qkv.data_ptr()}
    assert buffers.rows == 30 and buffers.kept and len(forward._programs) == 3
    states, reference = (own.take_features() for own in (session, plain))
    assert states is not None and torch.allclose(states, reference, atol=1e-4)
    assert torch.allclose(
        ModelSession(model).feed(IDS[:9], keep=9), ModelSession(tiny_model("qwen3")).feed(IDS[:9], keep=9), atol=1e-4
    )
    assert forward._buffers is buffers


@pytest.mark.parametrize("mode", [torch.inference_mode, partial(torch.device, "meta"), torch.no_grad])
def test_buffers_do_not_depend_on_the_mode_in_which_they_are_made(mode: Callable[[], Any]) -> None:
    model, ids = tiny_model("qwen3"), torch.tensor([IDS[:20]])
    InvariantEngine([model], [], AS_LOADED).install()
    program = engine_forward(model)._program
    with mode():
        first = program(1, 20).qkv
    assert (first.dtype, first.device.type, first.is_inference()) == (torch.float32, "cpu", False)
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, tiny_model("qwen3")(input_ids=ids).logits, atol=1e-4)


@torch.no_grad()
def test_a_cache_of_fewer_layers_is_not_written() -> None:
    """It has no memory for the others."""
    model, cut = lean_model(), first_layers(lean_model(), 1)
    cache = engine_forward(cut).new_cache()
    assert engine_forward(cut)._takes(cache) and not engine_forward(model)._takes(cache)
    assert not engine_forward(model)._takes(DynamicCache())


def test_a_short_prompt_is_fed_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    session, widths = ModelSession(tiny_model("qwen3")), []
    one_pass = ModelSession._pass
    monkeypatch.setattr(
        ModelSession, "_pass", lambda self, rows, keep: widths.append(len(rows[0])) or one_pass(self, rows, keep)
    )
    session.feed(IDS[:MAX_WIDTH], keep=3)
    assert widths == [MAX_WIDTH]


def test_the_products_alone_that_benchmarks_run_are_those_of_a_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, used = lean_model("gemma3_text"), []
    forward, jobs = engine_forward(model), CompiledKernel.jobs
    session = ModelSession(model)
    session.feed(IDS[:20], keep=1)

    def noted(self: CompiledKernel, x: Any, out: Any, rows: int, **others: Any) -> Any:
        used.append((self, rows))
        return jobs(self, x, out, rows, **others)

    monkeypatch.setattr(CompiledKernel, "jobs", noted)

    def products(run: Callable[[], Any]) -> list[tuple[CompiledKernel, int]]:
        """Those whose jobs a pass makes: none of an earlier pass is known."""
        forward._programs.clear()
        for kernel in kernels:
            kernel._calls.clear()
        used.clear()
        run()
        return used.copy()

    kernels = {part.kernel for part in model.modules() if isinstance(part, EngineLinear)}
    step = products(lambda: session.feed(IDS[:21], keep=1))
    assert {*step} == {(kernel, 1) for kernel in kernels}
    assert Counter(products(lambda: run_products(model))) == Counter(step)


def test_a_cut_has_a_forward_pass_of_its_own() -> None:
    model = lean_model()
    cut, plain = first_layers(model, 1), first_layers(tiny_model("qwen3"), 1)
    assert engine_forward(cut) is not engine_forward(model)
    own, other = (ModelSession(part, rewinds=False).feed(IDS[:20], keep=4) for part in (cut, plain))
    assert torch.allclose(own, other, atol=1e-4)
