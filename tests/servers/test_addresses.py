"""Addresses and keys: what is refused, what is derived from a URL, and that a key is never repeated."""

from dataclasses import replace
from socket import AF_INET, gethostname

import pytest
from psutil import net_if_addrs

from utils.errors import UserError
from utils.servers.address import (
    REMOVED,
    ServerAddress,
    checked,
    key_headers,
    other_machine,
    server_address,
    without_key,
    without_server,
)

KEY = "sk-4f9a1c77e2b0"


@pytest.mark.parametrize(
    ("url", "root", "api"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("https://example.org/a/v4", "https://example.org/a", "https://example.org/a/v4"),
        ("http://[::1]:9", "http://[::1]:9", "http://[::1]:9/v1"),
    ],
)
def test_the_root_and_the_api_follow_from_the_url(url: str, root: str, api: str) -> None:
    address = server_address("a", url)
    assert (address.root, address.api) == (root, api)


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "ftp://a", "http://", "http://a:99999", "http://a:0", "http://[a", "http://a b", ""),
        *("http://a/?key=1", "http://a/#x", "http://user:pass@a", "http://a\x1b[31m", "http://\u00e4.org"),
    ],
)
def test_other_urls_are_refused_without_control_characters_or_passwords(url: str) -> None:
    with pytest.raises(UserError) as caught:
        server_address("a", url)
    assert "\x1b" not in str(caught.value) and "pass@" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("", {}), ("1a", {}), ("a b", {}), ("a\x1b", {}), ("a" * 33, {})),
        *(("a", {"omit": "a b"}), ("a", {"rename": "a"}), ("a", {"rename": "a:b:c"})),
        *(("a", {"model": ""}), ("a", {"model": "m\n"}), ("a", {"baseline": "a"}), ("a", {"timeout": 0.0})),
    ],
)
def test_names_and_options_are_checked(name: str, options: dict[str, str]) -> None:
    with pytest.raises(UserError):
        server_address(name, "http://a", **options)  # type: ignore[arg-type]


def test_a_key_in_place_of_a_variable_is_refused_and_not_repeated() -> None:
    with pytest.raises(UserError) as caught:
        server_address("a", "http://a", key=KEY)
    assert KEY not in str(caught.value)


def test_hosts() -> None:
    here = [server_address("a", f"http://{host}:1").host for host in ("localhost", "127.0.0.1", "[::1]", "127.8.0.1")]
    assert set(here) == {"localhost"}
    own = [entry.address for entries in net_if_addrs().values() for entry in entries if entry.family == AF_INET]
    assert all(server_address("a", f"http://{host}:1").host == "localhost" for host in (*own, gethostname(), "0.0.0.0"))
    assert server_address("a", "http://192.168.0.1").host == "192.168.0.1"
    assert server_address("a", "http://192.168.0.1", key="K").sends_key_in_clear
    assert not server_address("a", "https://192.168.0.1", key="K").sends_key_in_clear
    assert not ServerAddress("a", "http://localhost", key="K").sends_key_in_clear


def test_machines_are_the_same_by_their_host_or_because_the_user_says_so() -> None:
    here, there = ServerAddress("here", "http://127.0.0.1"), ServerAddress("there", "http://192.0.2.1")
    assert "there and here are on different hosts" in (reason := other_machine(there, here)) and "same=here" in reason
    assert "same=target" in other_machine(there, None) and "same=target" in other_machine(None, there)
    assert not other_machine(here, None) and not other_machine(None, None)
    for ours, theirs in ((replace(there, same="here"), here), (there, replace(here, same="there"))):
        assert not other_machine(ours, theirs) and not other_machine(theirs, ours)
    assert not other_machine(replace(there, same="target"), None)
    named = checked((here, replace(there, same="here")))
    assert without_server(named, "here") == (there,)
    with pytest.raises(UserError, match="same 'her' is unknown"):
        checked((here, replace(there, same="her")))


@pytest.mark.parametrize("value", [None, "", "  ", "two words", "a\nX-Other: 1", "schl\u00fcssel"])
def test_a_key_that_cannot_be_sent(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERVER_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SERVER_KEY", value)
    with pytest.raises(UserError, match="SERVER_KEY") as caught:
        key_headers("SERVER_KEY")
    assert value is None or not value.strip() or value not in str(caught.value)


def test_a_key_is_sent_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    assert key_headers("SERVER_KEY") == {"Authorization": f"Bearer {KEY}"} and key_headers(None) == {}
    assert without_key(f"say {KEY}{KEY}, thanks", "SERVER_KEY") == f"say {REMOVED}{REMOVED}, thanks"
    assert without_key(KEY, None) == KEY
    monkeypatch.delenv("SERVER_KEY")
    assert without_key("a text", "SERVER_KEY") == "a text"


def test_a_placeholder_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "EMPTY")
    assert without_key("EMPTY or not", "SERVER_KEY") == "EMPTY or not"
