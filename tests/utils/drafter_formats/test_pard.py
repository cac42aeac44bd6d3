"""PARD models are recognised by their config, loaded like any model, and draft a block in one pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import tiny_pair
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_tokenizer
from tiny_jobs import replay_gammas

from ngram_assisted import NGramStorage
from sampling import RULES, autoregressive_generate, autoregressive_steps, speculative_generate, speculative_steps
from sampling.drafters.cross_tokenizer import CrossTokenizerDrafter
from sampling.drafters.masked import MaskedSession
from utils.bounds import MAX_GAMMA
from utils.comparison.strategies import STRATEGIES, Job
from utils.config.settings import Settings
from utils.decode.layer_cut import first_layers
from utils.engine import Engine
from utils.metrics.costs import Costs
from utils.metrics.results import tokens_of
from utils.pairs.drafter_kinds import Replay, drafter_kind

PROMPT, LENGTH = [5, 17, 3, 99], 16


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_llama(vocab_size=300, num_hidden_layers=2)
    return save_folder(tmp_path_factory.mktemp("target"), model, tiny_tokenizer())


def drafter(folder: Path, *, shift: int = 0, **keys: Any) -> Path:
    """A model of the target's vocabulary with further keys in its config."""
    save_folder(folder, tiny_llama(1, vocab_size=300), tiny_tokenizer(shift=shift))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | keys), encoding="utf-8")
    return folder


def job_of(pair: Any, **settings: Any) -> Job:
    return Job(PROMPT, pair, Settings(length=LENGTH, verify="coupled", chat=False, **settings), NGramStorage(3, 300))


def run(pair: Any, **settings: Any) -> tuple[Any, list[Any], list[int]]:
    """What the pair's drafter is built into, a run, and the target's own text."""
    job = job_of(pair, **settings)
    built = drafter_kind("loaded").build(job.drafter_inputs())
    steps = speculative_steps(PROMPT, built.drafter, built.target, job.decoding, gamma=16, rule=RULES["coupled"])
    expected = autoregressive_steps(PROMPT, job.session("target", rewinds=False), job.decoding)
    return built, list(steps), tokens_of(expected)


@pytest.mark.parametrize(
    ("keys", "size", "words"),
    [
        ({"pard_token": 290}, 8, "8 drafts in one pass"),
        ({"pard_token": 290, "spd_type": "pard", "para_num": 5}, 5, "5 drafts in one pass"),
        ({"pard_token": 0, "block_size": 1}, 1, "1 draft in one pass"),
    ],
)
def test_a_model_with_a_mask_token_drafts_blocks(tmp_path, target, keys, size, words):
    pair = load(target, drafter(tmp_path, **keys))
    assert pair.drafter_kind == "PARD" and any("is a PARD model" in note and words in note for note in pair.notes)
    built, steps, expected = run(pair, gamma=16)
    assert isinstance(built.drafter._session, MaskedSession) and built.replay is Replay.BY_ROUND
    assert tokens_of(steps) == expected
    assert {len(step.drafted) for step in steps[: -size - 1]} == {size}


def test_drafts_are_the_models_own_after_mask_tokens(tmp_path, target):
    pair = load(target, drafter(tmp_path, pard_token=290))
    with torch.no_grad():
        expected = pair.drafter(torch.tensor([[*PROMPT, *[290] * 7]])).logits[0, -8:]
    session = drafter_kind("loaded").build(job_of(pair).drafter_inputs()).drafter._session
    session.begin(PROMPT)
    rows = [session.feed([*PROMPT, *range(row)], keep=1)[0] for row in range(8)]
    assert torch.allclose(torch.stack(rows), expected, atol=1e-4)


def test_adaptive_gamma_knows_the_block(tmp_path, target):
    pair = load(target, drafter(tmp_path, pard_token=290))
    built, steps, expected = run(pair, gamma=None)
    assert built.drafter._adaptive._block == built.drafter._block == 8
    assert tokens_of(steps) == expected


def perfect_first_drafts() -> Any:
    """A pair whose first draft of each round is always right; those of the mask tokens are random."""
    pair = tiny_pair(num_hidden_layers=2)
    pair.drafter = tiny_llama(vocab_size=300)
    pair.drafter.config.pard_token, pair.drafter.config.para_num = 290, 5
    pair.engine = Engine([pair.target, pair.drafter])
    return pair


def test_an_engine_gives_the_same_rounds():
    pair = perfect_first_drafts()
    _, steps, expected = run(pair, gamma=16)
    assert tokens_of(steps) == expected and all(step.accepted for step in steps[:-1])
    assert pair.engine.use("invariant", 1).verified
    assert run(pair, gamma=16)[1:] == (steps, expected)


@pytest.mark.parametrize("gamma", [2, *(pytest.param(gamma, marks=pytest.mark.full) for gamma in (5, 9)), None])
def test_replayed_rounds_are_those_of_a_run(gamma):
    pair = perfect_first_drafts()
    job, costs = job_of(pair, gamma=gamma), Costs((0.05, 0.1, 0.2, 0.3), (("model", 0.02),))
    job = replace(job, settings=replace(job.settings, costs=costs))
    row = next(row for row in STRATEGIES if row.name == "speculative")
    steps = list(row.steps(job))
    replayed = {found.gamma: found.steps for found in replay_gammas(job, [row], tokens_of(steps))}
    assert gamma is None or max(len(step.drafted) for step in steps) == min(gamma, 5)
    assert replayed[gamma] == steps and any(step.accepted for step in steps)


def test_other_drafters_of_the_pair_draft_token_by_token(tmp_path, target):
    """Neither a model without a mask token, nor a cut of a target that is a PARD model."""
    plain = load(target, drafter(tmp_path / "plain"))
    assert not any("PARD" in note for note in plain.notes)
    built, _, _ = run(plain, gamma=4)
    assert not isinstance(built.drafter._session, MaskedSession) and built.replay is Replay.BY_TOKEN
    cut = load(drafter(tmp_path / "target", pard_token=290), "layers:1")
    built, steps, expected = run(cut, gamma=4)
    assert not isinstance(built.drafter._session, MaskedSession) and tokens_of(steps) == expected


def test_another_tokenizer_means_token_by_token(tmp_path, target):
    pair = load(target, drafter(tmp_path, shift=1, pard_token=290))
    assert any("PARD model with a different tokenizer" in note for note in pair.notes)
    built, steps, expected = run(pair, gamma=4)
    assert isinstance(built.drafter, CrossTokenizerDrafter) and tokens_of(steps) == expected


@pytest.mark.parametrize("keys", [{"spd_type": "pard2"}, pytest.param({"pard2": True}, marks=pytest.mark.full)])
def test_pard_2_is_used_without_the_targets_hidden_states(tmp_path, target, keys):
    folder = drafter(tmp_path, pard_token=290, pard2_target_layers=[-1], **keys)
    (folder / "warp_model.bin").write_bytes(b"not read")
    pair = load(target, folder)
    assert any("without the target's hidden states" in note for note in pair.notes)
    built, _, _ = run(pair, gamma=4)
    assert isinstance(built.drafter._session, MaskedSession)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"spd_type": "pard"}, "has no pard_token"),
        ({"spd_type": "pard2", "pard_token": -1}, "-1 as pard_token"),
        ({"pard_token": 300}, "300 as pard_token"),
        ({"pard_token": "290"}, "'290' as pard_token"),
        ({"pard_token": 290, "para_num": 0}, "0 as para_num"),
        ({"pard_token": 290, "para_num": MAX_GAMMA + 1}, f"{MAX_GAMMA + 1} as para_num"),
        ({"pard_token": 290, "block_size": 2.5}, "2.5 as block_size"),
    ],
)
def test_unusable_keys_are_refused_in_one_sentence(tmp_path, target, keys, word):
    assert word in refusal(target, drafter(tmp_path, **keys))


@pytest.mark.parametrize("verify", ["rejection", "coupled"])
def test_the_library_function_drafts_blocks_too(verify):
    """One pass of the drafter for each round, and the rounds of a session."""
    pair, passes = perfect_first_drafts(), []
    hook = pair.drafter.register_forward_hook(lambda *_: passes.append(1))
    arguments = {"gamma": 16, "max_gen_len": LENGTH, "seed": 1, "verify": verify, "eos_tokens_id": None}
    made, acceptance = speculative_generate(PROMPT, pair.drafter, pair.target, first_target=False, **arguments)
    hook.remove()
    assert made == autoregressive_generate(PROMPT, pair.target, LENGTH, None, None, seed=1)
    _, steps, _ = run(pair, gamma=16, seed=1)
    drafted = [len(step.drafted) for step in steps]
    assert acceptance == sum(step.accepted for step in steps) / sum(drafted) and len(passes) == sum(map(bool, drafted))


def test_the_library_function_drafts_token_by_token_with_a_cut_of_a_pard_model():
    target = tiny_llama(vocab_size=300)
    target.config.pard_token = 290
    cut, passes = first_layers(target, 1), []
    cut.register_forward_hook(lambda *_: passes.append(1))
    speculative_generate(PROMPT, cut, target, gamma=4, max_gen_len=9, first_target=False, eos_tokens_id=None)
    assert len(passes) >= 8
