"""What `make gpu-check` measures. Each section yields rows, so that what was found before an error is kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import takewhile
from typing import Any

import torch
from gpu_guard import NotRun, Row, attempted
from gpu_setup import Setup, weight_bytes

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ENGINES = ("plain", "invariant", "cuda_graph")
RULES = ("greedy", "coupled", "rejection")
WIDTHS = (1, 2, 3, 5, 9, 17)
TESTED = (*range(2, 10), 12, 17, 24)
COMPARED = 24  # positions at each width
# Without graphs a pass takes many launches, on some machines 30 ms.
EAGER_WIDTHS, EAGER_REPEATS = (1, 2, 5, 9), 7
CONTEXT = 200  # tokens before a timed pass
TEXT_MODEL = "Llama, 6 layers"
TIMED = {"Qwen2 0.5B": "bfloat16", "Qwen2 1.5B": "bfloat16", "Llama 135M": "float32"}
PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 11, 5, 6, 7]


def bandwidth(setup: Setup) -> Iterator[Row]:
    """Memory bandwidth in GB/s: a copy counts what is read and written, a sum and a product what is read."""
    count = 2**16 if setup.tiny else 2**28
    x = torch.ones(count, device=setup.device)
    y = torch.empty_like(x)
    yield {"operation": "copy", "GB/s": 8 * count / setup.seconds(lambda: y.copy_(x)) / 1e9}
    yield {"operation": "sum", "GB/s": 4 * count / setup.seconds(lambda: x.sum()) / 1e9}
    side = 2 ** ((count.bit_length() - 1) // 2)
    matrix = x[: side * side].view(side, side).to(torch.bfloat16)
    vector = torch.ones(side, dtype=torch.bfloat16, device=setup.device)
    yield {"operation": "matrix-vector product", "GB/s": 2 * side * side / setup.seconds(lambda: matrix @ vector) / 1e9}


def self_test(setup: Setup) -> Iterator[Row]:
    """Logits by verify width against those of single steps in the same engine, and against plain single steps."""
    for name, dtype in DTYPES.items():
        plain: dict[str, Any] = {}
        for engine in ENGINES:
            yield attempted({"dtype": name, "engine": engine}, _width_row, setup, dtype, (engine, plain))


def _width_row(setup: Setup, dtype: torch.dtype, found: tuple[str, dict[str, Any]]) -> Row:
    from utils.decode.logit_drift import LogitDrift, logits_by_width
    from utils.decode.model_session import ModelSession
    from utils.engine.selftest import sample_context

    (engine, plain), model = found, setup.model(TEXT_MODEL, dtype)
    made = setup.installed(engine, model)
    context, session = sample_context(model, 24 + COMPARED), ModelSession(model)
    session.feed(context[:24], keep=1)
    alone = logits_by_width(session, context, COMPARED, 1)
    by_width = {width: logits_by_width(session, context, COMPARED, width) for width in TESTED}
    drift = LogitDrift.of([alone, *by_width.values()])
    reference = plain.setdefault("logits", alone)
    return {
        "other bits at widths": _listed(
            [width for width, logits in by_width.items() if not torch.equal(logits, alone)]
        ),
        "largest difference": drift.difference,
        "other argmax": f"{drift.flips} of {drift.positions}",
        "from plain": LogitDrift.of([alone, reference]).difference,
        "promise": "" if made is None else made.promise,
        "own forward": "" if made is None else made.has_own_forward,
    }


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values)) or "none"


def steps(setup: Setup, gigabytes_per_second: float | None) -> Iterator[Row]:
    """Milliseconds of a decode step after CONTEXT tokens, verify costs v(k) in steps, memory, and the speed that
    reading the weights once per step would allow.
    """
    ways = {
        "transformers": _eager_passes,
        "plain": _session_passes,
        "cuda_graph": partial(_session_passes, engine="cuda_graph"),
        "generate": _generate,
    }
    for name, dtype in TIMED.items():
        setup.reset_peak()
        model = setup.model(name, DTYPES[dtype])
        for way, timed in ways.items():
            setup.reset_peak()
            row = attempted({"model": f"{name}, {dtype}", "by": way}, _timed_row, setup, model, timed)
            if "ms" in row:
                row["tokens/s"] = 1000 / row["ms"]
                if gigabytes_per_second:
                    row["of the limit"] = weight_bytes(model) / gigabytes_per_second / 1e6 / row["ms"]
                row["peak MB"] = setup.peak_mb()
            yield row
        for engine in ("plain", "cuda_graph"):
            row = {"model": f"{name}, {dtype}", "by": f"a draft, {engine}"}
            yield attempted(row, _draft_row, setup, model, engine)


def _draft_row(setup: Setup, model: Any, engine: str) -> Row:
    """One draft of a random drafter of the EAGLE-3 kind. own forward: whether it was recorded."""
    from sampling.drafters.feature_sessions import HeadSession
    from utils.decode.features import layer_count
    from utils.drafter_formats.eagle3_file import new_eagle3
    from utils.drafter_formats.target_parts import DraftHead, share_parts

    layers = (1, layer_count(model) // 2, layer_count(model) - 1)
    drafter, vocabulary = new_eagle3(model, layers), model.config.vocab_size
    share_parts(
        drafter, model.get_input_embeddings(), DraftHead(model.get_output_embeddings(), None, vocabulary), model
    )
    made = setup.installed(engine, model)
    if made is not None:
        made.compute([drafter])
    try:
        session, ids = HeadSession(drafter), _ids(model, CONTEXT + 2)
        session.begin(ids[:1])
        features = torch.randn(CONTEXT, drafter.fc.in_features, device=setup.device, dtype=model.dtype)
        session.add_features(features, 0, CONTEXT)
        session.feed(ids[: CONTEXT + 1], keep=1)
        seconds = setup.seconds(partial(session.feed, ids, keep=1), after=partial(session.rewind, CONTEXT))
        return {"ms": 1000 * seconds, "own forward": drafter.compiled is not None}
    finally:
        if made is not None:
            made.remove()


def _timed_row(setup: Setup, model: Any, timed: Callable[[Setup, Any], dict[int, float]]) -> Row:
    with torch.no_grad():
        seconds = timed(setup, model)
    return {"ms": 1000 * seconds[1]} | {f"v({k})": seconds[k] / seconds[1] for k in WIDTHS if k in seconds and k > 1}


def _ids(model: Any, count: int) -> list[int]:
    return [7919 * (index + 1) % model.config.vocab_size for index in range(count)]


def _eager_passes(setup: Setup, model: Any) -> dict[int, float]:
    """Passes of transformers' own forward and cache, without anything of this project."""
    from transformers import DynamicCache

    ids, keys = torch.tensor([_ids(model, CONTEXT + WIDTHS[-1])], device=setup.device), DynamicCache()
    model(input_ids=ids[:, :CONTEXT], past_key_values=keys, use_cache=True)
    seconds = {}
    for width in EAGER_WIDTHS:
        new = ids[:, CONTEXT : CONTEXT + width]
        seconds[width] = setup.seconds(
            partial(model, input_ids=new, past_key_values=keys, use_cache=True),
            repeats=EAGER_REPEATS,
            after=partial(keys.crop, -width),
        )
    return seconds


def _session_passes(setup: Setup, model: Any, engine: str = "plain") -> dict[int, float]:
    from utils.decode.model_session import ModelSession

    ids, made = _ids(model, CONTEXT + WIDTHS[-1]), setup.installed(engine, model)
    try:
        session = ModelSession(model)
        session.feed(ids[:CONTEXT], keep=1)
        widths, repeats = (EAGER_WIDTHS, EAGER_REPEATS) if made is None else (WIDTHS, 15)
        return {
            width: setup.seconds(
                partial(session.feed, ids[: CONTEXT + width], keep=width),
                repeats=repeats,
                after=partial(session.rewind, CONTEXT),
            )
            for width in widths
        }
    finally:
        if made is not None:
            made.remove()


def _generate(setup: Setup, model: Any) -> dict[int, float]:
    """A token of `generate`: the difference of a long and a short run, so that the prefill is left out."""
    ids = torch.tensor([_ids(model, CONTEXT)], device=setup.device)
    mask = torch.ones_like(ids)

    def run(count: int) -> Any:
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )

    short, long = (setup.seconds(partial(run, count), repeats=2, warm_ups=1) for count in (4, 20))
    return {1: max(long - short, 1e-9) / 16}


def texts(setup: Setup) -> Iterator[Row]:
    """Texts of all strategies: how many of the first tokens equal those of the target alone."""
    for dtype in ("float32", "bfloat16"):
        for engine in ("plain", "cuda_graph"):
            installed = cache(partial(_installed_model, setup, DTYPES[dtype], engine))
            for decoding in ("greedy", "coupled"):
                row = {"dtype": dtype, "engine": engine, "decoding": decoding}
                yield attempted(row, _text_row, setup, installed, decoding)


def _installed_model(setup: Setup, dtype: torch.dtype, engine: str) -> Any:
    model = setup.model(TEXT_MODEL, dtype)
    setup.installed(engine, model)
    return model


def _text_row(setup: Setup, installed: Callable[[], Any], decoding: str) -> Row:
    from ngram_assisted import NGramStorage, ngram_assisted_speculative_generate
    from sampling import autoregressive_generate, speculative_generate
    from utils.decode.layer_cut import first_layers
    from utils.logits_processor import GreedyProcessor, MultinomialProcessor

    model, length = installed(), 16 if setup.tiny else 48
    common: dict[str, Any] = {
        "logits_processor": GreedyProcessor() if decoding == "greedy" else MultinomialProcessor(0.7),
        "max_gen_len": length,
        "eos_tokens_id": None,
        "seed": 3,
    }
    alone = autoregressive_generate(PROMPT, model, **common)
    again = autoregressive_generate(PROMPT, model, **common)
    storage = NGramStorage(3, model.config.vocab_size)
    storage.initialize(PROMPT)
    drafted = {
        "layers:2": speculative_generate(PROMPT, first_layers(model, 2), model, gamma=4, verify="coupled", **common),
        "n-gram": ngram_assisted_speculative_generate(PROMPT, storage, model, gamma=6, verify="coupled", **common),
    }
    row: Row = {"target again": f"{_equal(again, alone)} of {len(alone)}"}
    for name, (tokens, acceptance) in drafted.items():
        row |= {name: f"{_equal(tokens, alone)} of {len(alone)}", f"{name} accepted": acceptance}
    return row


def _equal(tokens: list[int], expected: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, expected, strict=False)))


def quantizations(setup: Setup) -> Iterator[Row]:
    """Quantized weights: whether they load and run, in a layer cut as well, and what they cost."""
    for kind in ("bnb-int8", "nf4", "int8", "int4"):
        library = "bitsandbytes" if kind in ("bnb-int8", "nf4") else "optimum-quanto"
        yield attempted({"kind": kind, "library": library}, _quantized_row, setup, kind)


def _quantized_row(setup: Setup, kind: str) -> Row:
    from utils.decode.layer_cut import first_layers
    from utils.decode.model_session import ModelSession
    from utils.models.quantization import quantize_loaded

    __import__("bitsandbytes" if kind in ("bnb-int8", "nf4") else "optimum.quanto")
    model = setup.model(TEXT_MODEL, torch.bfloat16 if setup.is_cuda else torch.float32)
    ids = _ids(model, 40)
    before = ModelSession(model).feed(ids, keep=20)
    setup.reset_peak()
    quantize_loaded(model, kind, TEXT_MODEL)
    after = ModelSession(model).feed(ids, keep=20)
    cut = ModelSession(first_layers(model, 1)).feed(ids, keep=1)
    seconds = _session_passes(setup, model)
    return {
        "ms": 1000 * seconds[1],
        "v(5)": seconds[5] / seconds[1],
        "same argmax": float((before.argmax(-1) == after.argmax(-1)).float().mean()),
        "layers:1": "runs" if bool(cut.isfinite().all()) else "is not finite",
        "peak MB": setup.peak_mb(),
    }


def placement(setup: Setup) -> Iterator[Row]:
    """Rounds of four drafts: milliseconds, and how often the host waits for the GPU."""
    for engine in ("plain", "cuda_graph"):
        for decoding in RULES:
            row = {"engine": engine, "rule": decoding, "drafter": "layers:2"}
            yield attempted(row, _round_row, setup, engine, decoding)


def _round_row(setup: Setup, engine: str, decoding: str) -> Row:
    from sampling import ModelDrafter, choose_rule, speculative_steps
    from utils.decode.decoding import Decoding
    from utils.decode.layer_cut import first_layers
    from utils.decode.model_session import ModelSession
    from utils.logits_processor import GreedyProcessor, MultinomialProcessor

    model = setup.model(TEXT_MODEL, torch.bfloat16)
    setup.installed(engine, model)
    rule = choose_rule("coupled" if decoding == "greedy" else decoding)
    processor = GreedyProcessor() if decoding == "greedy" else MultinomialProcessor(0.7)
    drafter_model, rounds = first_layers(model, 2), []

    def run() -> None:
        decoding_rules = Decoding.of(processor, 8 if setup.tiny else 32, end_ids=frozenset(), seed=3)
        drafter = ModelDrafter(
            ModelSession(drafter_model), decoding_rules, model.config.vocab_size, shares_noise=rule.shares_noise
        )
        steps = speculative_steps(PROMPT, drafter, ModelSession(model), decoding_rules, gamma=4, rule=rule)
        rounds.append(len(list(steps)))

    seconds = setup.seconds(run, repeats=3)
    row: Row = {"ms per round": 1000 * seconds / rounds[-1], "rounds": rounds[-1]}
    with _waits(setup) as waits:
        run()
    return row | {"waits per round": waits[0] / rounds[-1] if setup.is_cuda else None}


@contextmanager
def _waits(setup: Setup) -> Iterator[list[int]]:
    """Yields a list whose only item is, afterwards, how often an operation made the host wait for the GPU."""
    count = [0]
    if not setup.is_cuda:
        yield count
        return
    if not hasattr(torch.cuda, "set_sync_debug_mode"):
        raise NotRun("this torch does not report synchronizations")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield count
        finally:
            torch.cuda.set_sync_debug_mode("default")
    count[0] = sum("synchroniz" in str(warning.message) for warning in seen)
