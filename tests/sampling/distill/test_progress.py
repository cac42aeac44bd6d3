"""What a distillation says about a finished drafter."""

from sampling.distill.progress import expectation


def test_tokens_of_a_round_are_those_of_the_accepted_prefix():
    """1 + 0.5 + 0.5 * 0.4 tokens."""
    assert "50% of first drafts" in (text := expectation({"greedy": [0.5, 0.4], "drawn": [0.1, 0.1]})[0])
    assert "1.70 tokens" in text and "2 drafts" in text
    assert expectation({"greedy": [None, None], "drawn": [0.1, 0.1]}) == []
