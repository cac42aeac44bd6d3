"""The server that other tests talk to: its answers and faults are what they claim to be."""

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from servers.loopback import Faults, Loopback


@pytest.fixture
def server() -> Iterator[Loopback]:
    with Loopback() as running:
        yield running


def ask(server: Loopback, path: str = "/v1/completions", **body: Any) -> tuple[int, str]:
    """Status and body of a request; the body as far as it comes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    asked = {"model": "tiny", "prompt": "a b", "temperature": 0, "max_tokens": 5, "return_token_ids": True}
    connection.request("POST", path, json.dumps(asked | body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    try:
        return answer.status, answer.read().decode()
    except http.client.IncompleteRead as error:
        return answer.status, error.partial.decode()
    finally:
        connection.close()


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def test_a_stream_has_the_tokens_of_the_whole_answer(server: Loopback) -> None:
    whole = json.loads(ask(server)[1])
    streamed = events(ask(server, stream=True, stream_options={"include_usage": True})[1])
    parsed = [json.loads(event) for event in streamed[:-1]]
    ids = [token for event in parsed for choice in event["choices"] for token in choice["token_ids"]]
    assert streamed[-1] == "[DONE]"
    assert ids == whole["choices"][0]["token_ids"] and len(ids) == 5
    assert parsed[-1]["usage"] == whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    assert json.loads(ask(server, prompt="another")[1])["choices"][0]["token_ids"] != ids


def test_chat_prompts_seeds_and_end_tokens(server: Loopback) -> None:
    messages = [{"role": "user", "content": "hi"}]
    chat = json.loads(ask(server, "/v1/chat/completions", messages=messages)[1])
    assert chat["choices"][0]["message"]["content"].startswith(" w")
    texts = [ask(server, temperature=temperature, seed=seed)[1] for temperature in (0, 1) for seed in (1, 2)]
    assert texts[0] == texts[1] and texts[2] != texts[3]
    server.stops_after = 3
    assert [len(json.loads(ask(server, ignore_eos=flag)[1])["choices"][0]["token_ids"]) for flag in (False, True)] == [
        3,
        5,
    ]


@pytest.mark.parametrize("fault", ["plain", "abrupt", "reset"])
def test_a_cut_stream_has_no_end(server: Loopback, fault: str) -> None:
    server.faults = Faults(cut_after=2, abrupt=fault == "abrupt", reset=fault == "reset")
    try:
        text = ask(server, stream=True)[1]
    except ConnectionResetError:
        assert fault == "reset"
    else:
        assert len(events(text)) in (2, 3) and "[DONE]" not in text


def test_it_dies_in_mid_stream_and_comes_back(server: Loopback) -> None:
    server.faults = Faults(die_after=2)
    assert "[DONE]" not in ask(server, stream=True)[1]
    with pytest.raises(ConnectionRefusedError):
        for _ in range(100):
            with suppress(ConnectionResetError):  # connected while the server was stopping
                ask(server)
            time.sleep(0.02)
    server.faults = Faults()
    server.revive()
    assert ask(server)[0] == 200


@pytest.mark.parametrize(
    ("faults", "status", "part"),
    [
        (Faults(status=429, message="slow down"), 429, "slow down"),
        (Faults(html=True), 200, "<html>"),
        (Faults(odd_json=True), 200, '["not"'),
        (Faults(redirect="http://127.0.0.1:1/"), 307, ""),
    ],
)
def test_faults_of_whole_answers(server: Loopback, faults: Faults, status: int, part: str) -> None:
    server.faults = faults
    answered, text = ask(server)
    assert answered == status and part in text


def test_faults_of_streams(server: Loopback) -> None:
    server.faults = Faults(broken_json=True)
    with pytest.raises(ValueError):
        json.loads(events(ask(server, stream=True)[1])[1])
    server.faults = Faults(error_in_stream=True)
    assert "error" in json.loads(events(ask(server, stream=True)[1])[2])
    server.faults = Faults(broken_sse=True)
    assert not events(ask(server, stream=True)[1])
    server.faults = Faults(tokens_per_chunk=2, usage=False)
    answered = events(ask(server, stream=True, stream_options={"include_usage": True})[1])
    assert [len(json.loads(event)["choices"][0]["token_ids"]) for event in answered[:-1]] == [2, 2, 1, 0]


def test_delays_slots_and_the_log(server: Loopback) -> None:
    server.faults = Faults(first_delay=0.1, chunk_delay=0.02)
    begun = time.monotonic()
    ask(server, stream=True)
    assert time.monotonic() - begun >= 0.1 + 4 * 0.02
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: ask(server, stream=True, prompt=f"{number}"), range(4)))
    assert server.most_at_once == 4
    assert sorted(request.body["prompt"] for request in server.posts()[1:]) == ["0", "1", "2", "3"]


def test_keys_and_unknown_models(server: Loopback) -> None:
    assert ask(server, model="other")[0] == 404
    server.key = "secret"
    assert ask(server)[0] == 401 and "authorization" not in server.posts()[-1].headers


def test_requests_wait_for_a_slot() -> None:
    with Loopback(slots=1, faults=Faults(first_delay=0.1)) as server, ThreadPoolExecutor(3) as pool:
        begun = time.monotonic()
        list(pool.map(lambda number: ask(server, prompt=f"{number}"), range(3)))
        assert time.monotonic() - begun >= 0.3
