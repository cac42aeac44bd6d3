"""Estimates of a distillation: time, text and disk space."""

import shutil

import pytest

from sampling.distill.dataset import Corpus
from sampling.distill.estimate import Workload, estimate_text, estimated, space_text, written_bytes
from sampling.distill.options import Plan
from sampling.distill.progress import expectation
from utils.errors import UserError


def work(**changes):
    """Ten pages of 100 tokens, and 10 x 2 x 3 = 60 steps of training."""
    return Workload.of(Plan("x", tokens=950, rows=4, batch=2, passes=3, **changes), page_tokens=100, units=7)


@pytest.mark.parametrize(
    ("done", "spent", "hours", "pages", "steps"),
    [
        (0, 0.0, 0.0, 10, 60),
        (4, 99.0, 0.0, 6, 60),
        (10, 99.0, 0.0, 0, 60),
        (0, 0.0, 100 / 3600, 5, 18),  # 45 s of generation leave room for 5 pages, and 50 s are left for training
        (3, 30.0, 100 / 3600, 2, 18),
        (0, 0.0, 1 / 3600, 1, 1),  # at least one page and one step
        (5, 60.0, 100 / 3600, 0, 14),
        (0, 0.0, 1000 / 3600, 10, 60),
    ],
)
def test_work_that_is_left(done, spent, hours, pages, steps):
    """A page takes 10 s and a step 2.7 s."""
    estimate = estimated(work(hours=hours), done, spent, (10.0, 2.7))
    assert (estimate.pages, estimate.steps) == (pages, steps)
    assert estimate.generation == pytest.approx(pages * 10) and estimate.training == pytest.approx(steps * 2.7)


def test_the_sentence_names_the_text_that_fits_into_the_time_limit():
    limited = work(hours=100 / 3600)
    text = estimate_text(limited, 0, estimated(limited, 0, 0.0, (10.0, 2.7)))
    assert "500 tokens" in text and "no room for 5 more pages" in text and "1 min 39 s" in text
    text = estimate_text(work(), 0, estimated(work(), 0, 0.0, (10.0, 2.7)))
    assert "1,000 tokens" in text and "no room" not in text


def test_disk_space_is_that_of_the_pages(page, tmp_path):
    """Against the files of pages, whose headers are small."""
    corpus = Corpus(tmp_path)
    for _ in range(3):
        corpus.add(page)
    rows, length, units = page.features.shape
    plan = Plan("x", tokens=2 * rows * length)
    needed = Workload.of(plan, page_tokens=rows * length, units=units).disk_bytes(0, 0)
    assert needed == pytest.approx(written_bytes(tmp_path), rel=0.02)


@pytest.fixture
def page():
    import torch

    from sampling.distill.generate import Page

    tokens = torch.zeros(8, 50, dtype=torch.int32)
    features = torch.zeros(8, 50, 200, dtype=torch.bfloat16)
    return Page(tokens, features, torch.zeros(8, 50, dtype=torch.uint8), torch.zeros(8))


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
