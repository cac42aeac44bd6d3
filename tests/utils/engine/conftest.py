"""Fixtures of the engine tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from utils.engine import engine, selftest
from utils.engine.engine import LAYER_ENGINES
from utils.engine.layer_engine import PlainEngine
from utils.engine.stored_results import ResultFile


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """Restore the number of threads, which engines set."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _constant_costs() -> None:
    """Engines measure nothing after their trials. A fixture in tests/conftest.py stops the patch."""
    costs = tuple(0.1 * drafts for drafts in range(1, 17))
    mock.patch.object(engine, "verify_costs", lambda *arguments, **options: (1e-3, costs)).start()
    mock.patch.object(engine, "release_memory").start()  # the collection of garbage takes longer than tiny models


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the table of engines. The plain one is always the first row."""

    def replace_rows(**rows: type[PlainEngine]) -> None:
        for name in [*LAYER_ENGINES]:
            if name != "plain":
                monkeypatch.delitem(LAYER_ENGINES, name)
        for name, row in rows.items():
            monkeypatch.setitem(LAYER_ENGINES, name, row)

    return replace_rows


@pytest.fixture
def file(tmp_path: Path) -> ResultFile:
    """Results of the self-test, in a folder that does not exist yet."""
    return ResultFile(tmp_path / "cache" / "engine.json")


@pytest.fixture
def tests() -> Iterator[mock.Mock]:
    """Counts the self-tests, which still run."""
    with mock.patch.object(selftest, "width_dependence", wraps=selftest.width_dependence) as counted:
        yield counted
