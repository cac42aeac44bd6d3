"""Stored results of the self-test that are damaged or do not fit count as absent."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fixed_speeds import only_engines, prefer
from stored_starts import edit, only_entry, start

from utils.engine.stored_results import MAX_BYTES, ResultFile


@pytest.fixture(autouse=True)
def _invariant_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    only_engines(monkeypatch, "plain", "invariant")  # calls of the self-test are counted
    prefer("invariant")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b"null",
        b'{"format": 3}',
        b" " * (MAX_BYTES + 1),
        b"9" * 5000,
    ],
)
def test_a_damaged_or_foreign_file_counts_as_absent(content: bytes, file: ResultFile, tests: mock.Mock) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(content)
    assert not start(file).state.tested_on and tests.call_count == 1
    assert start(file).state.tested_on and tests.call_count == 1, "the file was replaced by a valid one"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "second"},
        {"kind": 3},
        {"threads": 0},
        {"threads": True},
        {"threads": 10**30},
        {"tested_counts": "12"},
        {"tested_on": "today"},
        {"tested_on": "\x1b[31m"},
        {"layouts": {"32x32": "x"}},
        {"layouts": [1]},
        {"step_seconds": 0},
        {"step_seconds": float("nan")},
        {"step_seconds": "1"},
        {"costs": [-1]},
        {"costs": [float("inf")]},
        {"costs": 3},
        {"draft_seconds": {"head": None}},
        {"reason": None},
        {"reason": "x" * 100_000},
    ],
)
def test_a_damaged_entry_counts_as_absent(change: Any, file: ResultFile, tests: mock.Mock) -> None:
    start(file)
    edit(file, change)
    assert not start(file).state.tested_on and tests.call_count == 2
    assert only_entry(file)["kind"] == "invariant"
    edit(file, {"layouts": {"96x32": 1}}, signed=False)  # a valid value, but not the one that was written
    assert not start(file).state.tested_on and tests.call_count == 3


@pytest.mark.parametrize("layouts", [{}, {"32x32": 0}, {"96x32": 7}, {"96x32": 1024}, {"not a shape": 1}])
def test_layouts_that_do_not_fit_give_no_wrong_guarantee(
    layouts: dict[str, int], file: ResultFile, tests: mock.Mock
) -> None:
    first = start(file)
    context = [5 * index % 96 for index in range(20)]
    logits = first._target(torch.tensor([context])).logits
    edit(file, {"layouts": only_entry(file)["layouts"] | layouts})
    again = start(file)
    assert again.state.verified
    assert torch.allclose(again._target(torch.tensor([context])).logits, logits, atol=1e-4)


def test_a_number_of_threads_that_was_not_tested_is_not_verified(file: ResultFile) -> None:
    start(file)
    edit(file, {"tested_counts": []})
    assert not start(file).state.verified


def test_a_file_that_cannot_be_written_costs_only_time(tmp_path: Path, tests: mock.Mock) -> None:
    (tmp_path / "taken").write_text("")
    for path in (tmp_path / "taken" / "engine.json", tmp_path):
        assert start(ResultFile(path)).state.verified and start(ResultFile(path)).state.verified
    assert tests.call_count == 4 and [path.name for path in tmp_path.iterdir()] == ["taken"]
