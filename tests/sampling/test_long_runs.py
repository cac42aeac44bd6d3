"""Longer runs, for `make test-full` only."""

import json
from pathlib import Path

import pytest
from embedded_session import PROMPTS, session_of
from fakes import screen
from samplers import SAMPLERS
from toys import chi_square, decoding, joint_probs, opposed, session, toy

from sampling import ModelDrafter, speculative_steps
from utils.metrics.results import tokens_of
from utils.pairs.load_pair import load_pair
from utils.pairs.request import PairRequest

pytestmark = pytest.mark.full

MORE = [
    "Explain how a bicycle stays upright.",
    "Rewrite this function to use a loop:\\ndef f(n):\\n\\treturn 1 if n < 2 else n * f(n - 1)",
    "Count from one to thirty in words.",
    "Give me a JSON object with a name, an age and three hobbies.",
    "Summarise: The cat sat on the mat. The mat was red. The cat was not amused, and left the mat.",
    "What is 17 times 23? Show the steps.",
]


@pytest.mark.usefixtures("real_embedded_model")
def test_long_greedy_texts_are_the_same_with_wide_verify_passes(tmp_path: Path) -> None:
    """12 prompts x 64 tokens with a drafter whose drafts are often accepted."""
    file = tmp_path / "runs.jsonl"
    session = session_of(load_pair(PairRequest("embedded", "layers:28"), lambda message: None), screen(), file)
    for line in ("/length 64", "/gamma 8", *PROMPTS, *MORE):
        session.handle(line)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 12 * 3
    different = [
        (row["prompt"], row["strategy"], row["first_difference"]) for row in rows if not row["same_as_baseline"]
    ]
    assert not different


@pytest.mark.parametrize("processor", SAMPLERS, ids=str)
@pytest.mark.parametrize("gamma", [2, 5])
def test_sampled_distribution_with_many_more_draws(processor, gamma: int) -> None:
    """20,000 runs of three tokens. A correct decoder fails one of these tests with probability below 1e-5."""
    target = toy(11, 5)

    def sample(seed: int) -> tuple[int, ...]:
        plan = decoding(3, processor=processor, seed=seed)
        drafter = ModelDrafter(session(opposed(target)), plan, 5)
        return tuple(tokens_of(speculative_steps([0], drafter, session(target), plan, gamma=gamma)))

    statistic, threshold = chi_square(sample, joint_probs(target, processor, 0, 3), 20_000)
    assert statistic < threshold
