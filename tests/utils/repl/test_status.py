"""The toolbar: changed settings that are easily forgotten, and the speeds of the last prompt."""

from dataclasses import replace
from typing import Any

import pytest
from fakes import Screen
from servers.loopback import Loopback
from servers.server_sessions import server_session

from utils.comparison.harness import Harness
from utils.config.settings import Settings
from utils.repl.status import status_line
from utils.servers.address import ServerAddress


@pytest.mark.parametrize(
    ("changes", "part"),
    [({"cache": False}, "cache off"), ({"debug": "on"}, "debug on"), ({}, "")],
)
def test_settings_that_are_easily_forgotten_are_shown(changes: dict[str, Any], part: str) -> None:
    settings = replace(Settings(), **changes)
    shown = status_line(None, settings, Harness.of(None, settings).state)
    assert shown == " | ".join(["no model", "processor greedy", *[part] * bool(part)])


def test_servers_and_their_speeds_are_shown(view: Screen) -> None:
    with Loopback() as server:
        session = server_session(view, ServerAddress("one", server.url))
        assert "no model | 1 server" in session.status() and "tokens/s" not in session.status()
        session.handle("Hello")
        assert "tokens/s: server one " in session.status()
