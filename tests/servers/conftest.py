"""A fixture of all tests that start servers."""

import pytest

from utils.servers.processes import local_servers


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs are ready at once."""
    monkeypatch.setattr(local_servers, "POLL", 0.02)
