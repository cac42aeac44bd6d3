"""What a distillation reports: the disk space that it needs, and what to expect of the drafter."""

import shutil

import pytest

from sampling.distill.pipeline import space_text
from sampling.distill.progress import expectation
from utils.errors import UserError


def test_a_disk_that_is_too_full_is_refused(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    assert "needs up to 1.0 MB" in space_text(tmp_path, 1_000_000)
    with pytest.raises(UserError, match="--tokens"):
        space_text(tmp_path, 2 * free)


def test_tokens_of_a_round_are_those_of_the_accepted_prefix():
    """1 + 0.5 + 0.5 * 0.4 tokens."""
    assert "50% of first drafts" in (text := expectation({"greedy": [0.5, 0.4], "drawn": [0.1, 0.1]})[0])
    assert "1.70 tokens" in text and "2 drafts" in text
    assert expectation({"greedy": [None, None], "drawn": [0.1, 0.1]}) == []
