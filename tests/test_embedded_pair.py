"""The embedded pair, as `make run` loads it: all strategies give the same greedy text, and so does transformers' own
generate. `make test` runs that on one prompt.
"""

from pathlib import Path
from random import Random

import pytest
import torch
from embedded_session import PROMPTS, session_of
from fakes import Screen, records_of
from logit_paths import assert_bits_of_single_steps, stepwise_logits
from toys import decoding

from sampling import autoregressive_steps
from utils.comparison.harness import Harness
from utils.comparison.strategies import STRATEGIES
from utils.config.settings import Settings
from utils.decode.layer_cut import first_layers
from utils.decode.model_info import context_length
from utils.decode.model_session import ModelSession
from utils.logits_processor import GreedyProcessor, NucleusProcessor
from utils.metrics.results import collect, tokens_of
from utils.pairs.load_pair import load_pair
from utils.pairs.pair import Pair
from utils.pairs.request import PairRequest
from utils.prompts.conversation import prompt_ids
from utils.repl.repl_session import Verdict


@pytest.fixture(scope="module")
def pair(real_embedded_model: None) -> Pair:
    return load_pair(PairRequest("embedded", "head"), lambda message: None)


@pytest.mark.full
def test_more_than_half_of_the_heads_first_drafts_are_accepted(pair: Pair) -> None:
    """Of 30 greedy tokens per prompt. The model card has the share on many more."""
    first = [0, 0]
    settings = Settings(gamma=1, length=30)
    harness = Harness.of(pair, settings)
    speculative = next(row for row in STRATEGIES if row.chooses_kind)
    for prompt in PROMPTS[2:]:
        job = harness.job(prompt_ids(pair.tokenizer, prompt, chat=True, system=None), settings)
        accepted, tried = collect(speculative.steps(job)).accepted_by_position[0]
        first = [first[0] + accepted, first[1] + tried]
    assert first[1] > 40 and first[0] / first[1] > 0.5, first


@pytest.mark.parametrize(
    ("prompts", "length", "kinds"),
    [
        (PROMPTS[3:4], 8, ["loaded"]),
        pytest.param(PROMPTS, 40, ["loaded", "layers:10", "chain"], marks=pytest.mark.full),
    ],
)
def test_the_greedy_text_of_every_strategy_is_that_of_generate(
    pair: Pair, view: Screen, tmp_path: Path, prompts: list[str], length: int, kinds: list[str]
) -> None:
    file, measured = tmp_path / "runs.jsonl", len(prompts) > 3
    session = session_of(pair, view, file, measured=measured)
    for line in (f"/length {length}", f"/drafter_kind {' '.join(kinds)}"):
        session.handle(line)
    for prompt in prompts:
        assert session.handle(prompt) is Verdict.DONE
    runs = len(kinds) + 2  # with n-grams and the target alone
    assert len(records_of(file)) == runs * len(prompts)
    for index, prompt in enumerate(prompts):
        ids = prompt_ids(pair.tokenizer, prompt, chat=True, system=None)
        whole = pair.target.generate(
            torch.tensor([ids]), max_new_tokens=length, do_sample=False, eos_token_id=list(pair.end_ids)
        )
        expected = whole[0, len(ids) :].tolist()
        for row in records_of(file)[runs * index : runs * (index + 1)]:
            assert row["token_ids"] == expected, (prompt, row["strategy"])
            assert row["same_as_baseline"] is True
    # On a busy machine drafts may not pay where costs are measured.
    assert measured or any(row["drafter_kind"] == "head" and row["accepted"] for row in records_of(file))


@pytest.mark.full
def test_all_texts_are_the_same_without_chat_template_and_without_cache(
    pair: Pair, view: Screen, tmp_path: Path
) -> None:
    file = tmp_path / "runs.jsonl"
    session = session_of(pair, view, file)
    for line in (
        "/chat off",
        "/length 8",
        "The three primary colours are",
        "/cache off",
        "The three primary colours are",
    ):
        assert session.handle(line) is Verdict.DONE
    assert len({tuple(row["token_ids"]) for row in records_of(file)}) == 1


@pytest.mark.full
def test_coupled_sampled_text_is_the_targets(pair: Pair, view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    session = session_of(pair, view, file)
    lines = ["/verify coupled", "/length 8", "/gamma 3"]
    for prompt, processor in zip(
        PROMPTS, ("multinomial 0.6", "nucleus 1 0.9", "topk 1.2 50", "topknucleus 0.8 40 0.95"), strict=False
    ):
        lines += [f"/processor {processor}", prompt]
    for line in lines:
        assert session.handle(line) is Verdict.DONE
    rows = records_of(file)
    assert len(rows) == 4 * 3
    assert [row["divergence"] for row in rows if not row["same_as_baseline"]] == []


@pytest.mark.full
def test_verify_passes_have_the_bits_of_decode_steps(pair: Pair) -> None:
    """The engine on the real weights of target and drafter: random widths and rewinds, and no cache."""
    state = pair.engine.use("invariant", 0)
    assert (state.kind, state.verified) == ("invariant", True), state
    context = [token for prompt in PROMPTS[:3] for token in prompt_ids(pair.tokenizer, prompt, chat=False, system=None)]
    for seed, model in enumerate((pair.target, first_layers(pair.target, 10))):
        assert_bits_of_single_steps(model, context, Random(seed))
        uncached = ModelSession(model, use_cache=False).feed(context, keep=5)
        assert torch.equal(uncached, stepwise_logits(model, context)[-5:])


@pytest.mark.full
def test_end_token_and_context_length_are_those_of_the_model(pair: Pair) -> None:
    assert pair.end_ids == {pair.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert context_length(pair.target) == 8192
    ids = prompt_ids(pair.tokenizer, "Say yes.", chat=True, system="Answer with one word.")
    plan = decoding(60, processor=GreedyProcessor(), ends=pair.end_ids)
    made = tokens_of(autoregressive_steps(ids, ModelSession(pair.target, rewinds=False), plan))
    assert len(made) < 60 and made[-1] in pair.end_ids


@pytest.mark.full
def test_sampled_tokens_lie_in_the_nucleus(pair: Pair) -> None:
    """The nucleus is that of one forward pass without a cache."""
    ids = prompt_ids(pair.tokenizer, PROMPTS[0], chat=True, system=None)
    processor = NucleusProcessor(1.0, 0.7)
    made = tokens_of(autoregressive_steps(ids, ModelSession(pair.target), decoding(20, processor=processor, seed=9)))
    with torch.no_grad():
        probs = processor(pair.target(torch.tensor([ids + made])).logits[0, len(ids) - 1 : -1])
    assert all(float(row[token]) > 0 for row, token in zip(probs, made, strict=True))
