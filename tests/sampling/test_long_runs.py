"""Wider and longer looks than `make test` has time for: `make test-full`."""

import json
from pathlib import Path

import pytest
from fakes import screen
from test_embedded_pair import PROMPTS, session_of
from test_sampled_distribution import SAMPLERS, START, speculate
from toys import chi_square, joint_probs, opposed, toy

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


def test_long_greedy_texts_are_one_text_at_a_wide_window(tmp_path: Path) -> None:
    """12 prompts x 64 tokens at a wide window, with a drafter that is often right."""
    file = tmp_path / "runs.jsonl"
    session = session_of(load_pair(PairRequest("embedded", "layers:28"), lambda message: None), screen(), file)
    for line in ("/length 64", "/gamma 8", *PROMPTS, *MORE):
        session.handle(line)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 12 * 3
    different = [(row["prompt"], row["strategy"], row["first_difference"]) for row in rows if not row["same_as_target"]]
    assert not different


@pytest.mark.parametrize("processor", SAMPLERS, ids=str)
@pytest.mark.parametrize("gamma", [2, 5])
def test_sampling_laws_with_many_more_draws(processor, gamma: int) -> None:
    """20,000 runs of three tokens; a correct decoder fails one of these with probability under 1e-5."""
    target = toy(11, 5)
    probs = joint_probs(target, processor, START, 3)
    statistic, threshold = chi_square(
        lambda seed: speculate(target, opposed(target), seed, processor=processor, gamma=gamma), probs, 20_000
    )
    assert statistic < threshold
