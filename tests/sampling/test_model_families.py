"""The model families: with every strategy each gives its own text, or is refused with the reason.

A row of the table is a tiny random model. Its drafter is a copy with noise on the weights, so that some drafts are
accepted and some are not. The reference is one forward pass per token, without cache or session, and transformers' own
greedy `generate` in `make test-full`, which also draws from every family. A family of each kind of cache meets every
drafter in `make test`. The others meet their own drafter and one more there, unless they differ little from another
family. In `make test-full` all meet all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from fakes import open_session, tiny_pair
from tiny import DECODER, build, next_logits, tiny_bart, tiny_marian, tiny_t5

from ngram_assisted import NGramStorage
from sampling import RULES
from utils.comparison.strategies import STRATEGIES, Job
from utils.config.settings import Settings
from utils.config.value_types import ProcessorSpec
from utils.decode.recurrent import CacheSupport
from utils.engine import Engine
from utils.errors import UserError
from utils.metrics.results import acceptance_of, tokens_of
from utils.repl.repl_session import Verdict

PROMPT = [5, 9, 13, 9, 5, 9, 13, 2, 40, 5, 9]
LENGTH = 14
KINDS = ("loaded", "layers:1", "lookup", "suffix", "chain", "ngram")
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
ONLY_STEPS = re.escape(CacheSupport.STEPS.value.format("").strip())
NO_STATE = re.escape(CacheSupport.NOTHING.value.format("").strip())
NO_CACHE = "returns no cache"


@dataclass(frozen=True, eq=False)
class Row:
    """kind: of the transformers classes. uncut: why layers:K is refused. refused: why drafts are refused with a cache.

    alone: whether the target alone is refused too. noise: on the drafter's weights.
    """

    name: str
    kind: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    uncut: str = ""
    refused: str = ""
    alone: bool = False
    noise: float = 0.03

    def model(self) -> Any:
        if self.name in ENCODERS:
            return ENCODERS[self.name]()
        config = getattr(transformers, f"{self.kind}Config")(**DECODER | self.fields)
        return build(transformers.AutoModelForCausalLM.from_config, config, 0)


ENCODERS: dict[str, Any] = {"t5": tiny_t5, "bart": tiny_bart, "marian": tiny_marian}
SMALL_STATE = {"mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
ENCODER, RECURRENT = "it is an encoder-decoder model", "it is a recurrent model"

ROWS = [
    Row("llama", "Llama"),
    Row("llama, one kv head, tied", "Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    Row("qwen2", "Qwen2"),
    Row("qwen3", "Qwen3", {"head_dim": 8}),
    Row(
        "gemma3",
        "Gemma3Text",
        SLIDING | {"tie_word_embeddings": False, "head_dim": 8},
    ),
    Row("mistral", "Mistral", {"sliding_window": 8}),
    Row("phi3", "Phi3"),
    Row("gpt2", "GPT2"),
    Row("gpt_neox", "GPTNeoX", noise=0.2),
    Row("lfm2", "Lfm2", {"layer_types": ["full_attention", "conv"], "block_multiple_of": 8}),
    Row(
        "falcon_h1",
        "FalconH1",
        SMALL_STATE | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "head_dim": 8},
        uncut=RECURRENT,
    ),
    Row(
        "bamba",
        "Bamba",
        SMALL_STATE | {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8},
        uncut=RECURRENT,
    ),
    Row("qwen3_next", "Qwen3Next", LINEAR | EXPERTS | HYBRID | {"head_dim": 8}, uncut=RECURRENT),
    Row(
        "mamba2",
        "Mamba2",
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
        uncut=RECURRENT,
    ),
    Row("mamba", "Mamba", {"state_size": 8}, uncut=RECURRENT, refused=ONLY_STEPS),
    Row("rwkv", "Rwkv", {"attention_hidden_size": 32}, uncut=RECURRENT, refused=NO_CACHE, alone=True),
    Row("minimax", "MiniMax", HYBRID | EXPERTS | {"head_dim": 8, "block_size": 4}, refused=NO_STATE, alone=True),
    Row("t5", uncut=ENCODER, noise=0.3),
    Row("bart", uncut=ENCODER),
    Row("marian", uncut=ENCODER, noise=0.3),
]

SOME = ("llama", "gemma3", "lfm2", "mamba2", "minimax", "t5")  # of every kind of cache
ORDER = (*SOME, *(row.name for row in ROWS if row.name not in SOME))
RELATED = ("llama, one kv head, tied", "phi3", "falcon_h1", "bamba", "marian")  # differ little from other rows


@cache
def pair_of(row: Row) -> Any:
    """A target and its drafter, as strategies receive them."""
    target = row.model()
    drafter = deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std(correction=0) * row.noise)
    return SimpleNamespace(
        target=target, drafter=drafter, drafter_kind="model", drafter_tokenizer=None, end_ids=frozenset()
    )


@cache
def greedy_text(row: Row) -> list[int]:
    """By one forward pass per token. The padding token of translation models is excluded."""
    made: list[int] = []
    for _ in range(LENGTH):
        logits = next_logits(pair_of(row).target, PROMPT, made)
        made.append(int(logits[: 63 if row.name == "marian" else None].argmax()))
    return made


def run(row: Row, kind: str, pair: Any = None, **changes: Any) -> tuple[list[int], float | None]:
    """Tokens and acceptance rate with a drafter kind, with `ngram` or of the target alone, as the program runs them."""
    settings = replace(Settings(length=LENGTH, costs=None), **changes)
    job = Job(PROMPT, pair or pair_of(row), settings, NGramStorage(3, 64))
    name, words = (kind, ("loaded",)) if kind in ("ngram", "target", "drafter", "beam") else ("speculative", (kind,))
    strategy = next(row for row in STRATEGIES if row.name == name).variants(words, job.pair)[0]
    steps = list(strategy.steps(job))
    return tokens_of(steps), acceptance_of(steps)


def kinds_of(row: Row) -> list[str]:
    return [kind for kind in KINDS if kind != "layers:1" or not row.uncut]


def two_kinds(row: Row) -> list[str]:
    """The drafter, and of the other kinds one in turn, so that the families of SOME meet all of them."""
    _, *others = kinds_of(row)
    return ["loaded", others[3 * ORDER.index(row.name) % len(others)]]


def plans(row: Row, cached: bool, few: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Drafter kinds with settings that vary from row to row, so that all combinations occur. All of them for a row of
    each kind of cache. few: the drafter and, with a cache, one more kind.
    """
    index = ROWS.index(row)
    gammas = islice(cycle((1, None, 4, 2) if cached else (3,)), index, None)
    kinds = kinds_of(row) if cached else ["loaded", *(["chain", "ngram"] if row.name in SOME else [])]
    if few:
        kinds = two_kinds(row) if cached else ["loaded"]
    for number, kind in enumerate(kinds, start=index):
        names = list(RULES)
        for rule in names if kind == "loaded" and cached and row.name in SOME else [names[number % 3]]:
            yield kind, {"gamma": next(gammas), "verify": rule, "cache": cached}


ROW = pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
SOME_ROWS = pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row.name in SOME else pytest.mark.full, id=row.name) for row in ROWS]
)


def check_greedy_text(row: Row, few: bool) -> None:
    expected = greedy_text(row)
    assert len(set(expected)) > 3, "a text of few different tokens proves little"
    for cached in (True, False):
        if not (row.alone and cached):
            assert run(row, "target", cache=cached)[0] == expected
        if not (row.refused and cached):
            made = {(kind, *plan.values()): run(row, kind, **plan) for kind, plan in plans(row, cached, few)}
            assert [plan for plan, (tokens, _) in made.items() if tokens != expected] == []
            assert any(0 < (rate or 0) < 1 for plan, (_, rate) in made.items() if plan[0] == "loaded"), (
                "nothing was rewound"
            )


@SOME_ROWS
def test_greedy_text_is_the_targets(row: Row) -> None:
    check_greedy_text(row, few=False)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.full if row.name in RELATED else (), id=row.name)
        for row in ROWS
        if row.name not in SOME
    ],
)
def test_greedy_text_with_few_drafters_is_the_targets(row: Row) -> None:
    check_greedy_text(row, few=True)


@SOME_ROWS
def test_coupled_sampled_text_is_the_targets(row: Row) -> None:
    drawn = {"processor": ProcessorSpec(0.7), "verify": "coupled", "cache": not row.refused}
    expected = run(row, "target", **drawn)[0]
    assert expected != greedy_text(row)
    assert all(run(row, kind, gamma=3, **drawn)[0] == expected for kind in two_kinds(row))


@pytest.mark.full
@ROW
def test_greedy_text_is_that_of_generate(row: Row) -> None:
    model = pair_of(row).target
    made = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=LENGTH)[0].tolist()
    assert made[1 if model.config.is_encoder_decoder else len(PROMPT) :] == greedy_text(row)


@pytest.mark.parametrize("row", [row for row in ROWS if row.refused], ids=lambda row: row.name)
def test_an_unusable_cache_is_refused_with_the_models_name_and_the_remedy(row: Row) -> None:
    for kind in ("target", "loaded", "ngram"):
        if row.alone or kind != "target":
            with pytest.raises(UserError, match=f"^{row.kind}ForCausalLM {row.refused}.*/cache off"):
                run(row, kind)


def test_models_that_cannot_be_cut_are_refused_with_the_reason() -> None:
    for row in ROWS:
        if row.uncut:
            with pytest.raises(UserError, match=row.uncut):
                run(row, "layers:1")
    lfm2 = next(row for row in ROWS if row.name == "lfm2")
    with pytest.raises(UserError):  # its class relies on a layer of attention
        run(replace(lfm2, fields=lfm2.fields | {"layer_types": ["conv", "full_attention"]}), "layers:1")


@pytest.mark.parametrize("name", ["llama", "t5", "bart", "marian"])
def test_forbidden_and_forced_tokens_are_those_of_generate(name: str) -> None:
    row = next(row for row in ROWS if row.name == name)
    text, settings = greedy_text(row), pair_of(row).target.generation_config
    original = deepcopy(settings)
    settings.suppress_tokens, settings.bad_words_ids = [text[0], text[3]], [[text[5]], [text[6]]]
    settings.begin_suppress_tokens, settings.forced_bos_token_id = list(range(40)), 62
    try:
        model = pair_of(row).target
        made = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=LENGTH)[0].tolist()
        expected = made[1 if model.config.is_encoder_decoder else len(PROMPT) :]
        assert expected != text and (expected[0] == 62) == model.config.is_encoder_decoder
        for index, kind in enumerate(("target", *two_kinds(row)), start=len(name)):
            assert run(row, kind, gamma=3, cache=bool(index % 2))[0] == expected
    finally:
        pair_of(row).target.generation_config = original


@pytest.mark.parametrize("row", [row for row in ROWS if not row.refused][::4], ids=lambda row: row.name)
def test_every_text_ends_at_its_first_end_token_and_at_the_end_of_the_context(row: Row) -> None:
    text, pair = greedy_text(row), pair_of(row)
    ends = SimpleNamespace(**vars(pair) | {"end_ids": frozenset({text[7], text[12]})})
    short = SimpleNamespace(**vars(pair) | {"target": copy(pair.target)})
    short.target.config = deepcopy(pair.target.config)
    short.target.config.max_position_embeddings = len(PROMPT) + 3
    room = len(PROMPT) + 2 if pair.target.config.is_encoder_decoder else 3
    for kind in two_kinds(row):
        assert run(row, kind, ends, gamma=5)[0] == text[: 1 + min(text.index(text[7]), text.index(text[12]))]
        assert run(row, kind, short, gamma=5)[0] == text[:room]


def test_a_target_without_a_usable_cache_runs_without_it(view: Any) -> None:
    row = next(row for row in ROWS if row.name == "rwkv")
    target = replace(row, fields=row.fields | {"vocab_size": 300}).model()
    pair = tiny_pair(drafter=False, chat=False)
    pair.target, pair.engine = target, Engine([target])
    session = open_session(view, pair)
    assert pair.engine.state.kind == "plain" and pair.engine.step_seconds > 0
    assert session.handle("Hello") is Verdict.FAILED and "cache off" in view.take()[1]
    assert session.handle("/cache off") is session.handle("Hello") is Verdict.DONE
