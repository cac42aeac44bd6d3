"""Addresses and keys: what is refused, what is derived from a URL, and that a key is never repeated."""

import json
from base64 import b64encode
from urllib.parse import quote

import pytest

from utils.errors import UserError
from utils.servers.address import ServerAddress, server_address
from utils.servers.secret import REMOVED, Secret, SecretStream

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
    assert not server_address("a", "http://192.168.0.1").is_local
    assert server_address("a", "http://192.168.0.1", key="K").sends_key_in_clear
    assert not server_address("a", "https://192.168.0.1", key="K").sends_key_in_clear
    assert not ServerAddress("a", "http://localhost", key="K").sends_key_in_clear


@pytest.mark.parametrize("value", [None, "", "  ", "two words", "a\nX-Other: 1", "schl\u00fcssel"])
def test_a_key_that_cannot_be_sent(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERVER_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SERVER_KEY", value)
    with pytest.raises(UserError, match="SERVER_KEY") as caught:
        Secret("SERVER_KEY")
    assert value is None or not value.strip() or value not in str(caught.value)


def test_a_key_is_removed_wherever_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    secret = Secret("SERVER_KEY")
    assert KEY not in repr(secret) and secret.headers == {"Authorization": f"Bearer {KEY}"}
    assert secret.scrub({"a": [f"x{KEY}y", 3]}) == {"a": [f"x{REMOVED}y", 3]}
    text = f"say sk-4f9a1 or {KEY}{KEY}, thanks s"
    for size in range(1, len(text)):
        stream = SecretStream(secret)
        shown = [stream.add(text[start : start + size]) for start in range(0, len(text), size)]
        assert "".join(shown) + stream.end() == text.replace(KEY, REMOVED)
    stream = SecretStream(secret)
    assert KEY[:-1] not in stream.add(KEY[:-1]) + stream.end()


def test_a_placeholder_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "EMPTY")
    assert Secret("SERVER_KEY").scrub("EMPTY or not") == "EMPTY or not"
    assert Secret(None).scrub(KEY) == KEY and Secret(None).headers == {}


@pytest.mark.parametrize("key", ["sk-4f9a1c77e20b", 's3cr/et+K"ey\\=9F7q'])
def test_encoded_keys_are_removed_too(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", key)
    secret = Secret("SERVER_KEY")
    encoded = [b64encode(text.encode()).decode() for text in (key, f"Bearer {key}")]
    encoded += [text.replace("+", "-").replace("/", "_") for text in encoded]
    for form in (key, json.dumps(key)[1:-1], quote(key), quote(key, safe=""), *encoded):
        core = form.rstrip("=")
        assert core not in secret.scrub(f"a {form} b"), form
        for size in (1, 3, 7):
            stream, text = SecretStream(secret), f"a {form} b"
            shown = "".join(stream.add(text[start : start + size]) for start in range(0, len(text), size))
            shown += stream.end()
            assert core not in shown and shown.startswith("a ") and shown.endswith(" b"), form
