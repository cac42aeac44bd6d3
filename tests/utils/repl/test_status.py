"""The toolbar: changed settings that are easily forgotten, and the speeds of the last prompt."""

from dataclasses import replace

import pytest
from fakes import Screen
from servers.loopback import Loopback
from servers.server_sessions import server_session

from utils.config.settings import Settings, setting_fields
from utils.servers.address import ServerAddress


@pytest.mark.parametrize("line", ["/cache off", "/chat off", "/tree comb", "/tree auto"])
def test_changed_settings_are_shown_until_they_are_changed_back(line: str, view: Screen) -> None:
    session = server_session(view)
    name, value = line.removeprefix("/").split()
    before, setting = session.status(), setting_fields()[name]
    session.settings = replace(session.settings, **{name: setting.value_type.parse(value)})
    assert f"{name} {value}" in session.status().split(" | ") and name not in before
    session.settings = Settings()
    assert name not in session.status()


def test_servers_and_their_speeds_are_shown(view: Screen) -> None:
    with Loopback() as server:
        session = server_session(view, ServerAddress("one", server.url))
        assert "no model | 1 server" in session.status() and "tokens/s" not in session.status()
        session.handle("Hello")
        assert "tokens/s: server one " in session.status()
