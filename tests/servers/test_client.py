"""The client against a server on loopback: texts, counts, times, and one sentence for every failure."""

import json
import socket
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from servers.loopback import Faults, Loopback

from utils.decode.steps import FinishReason
from utils.servers.address import ServerAddress
from utils.servers.client import MAX_LINE, AnswerStream, ServerClient
from utils.servers.kinds import recognise
from utils.servers.kinds.completion import IDS, UNCOUNTED, USAGE, Chat, Piece, ServerCompletion, ServerRequest
from utils.servers.kinds.server_kind import ServerError, ServerKind

KEY = "sk-4f9a1c77e2b0"
REQUEST = ServerRequest("a b", 6)


class WithIds(ServerKind):
    """A kind that takes and gives token ids."""

    takes_token_ids = True

    def further_fields(self, request: ServerRequest) -> dict[str, Any]:
        return {"return_token_ids": True}

    def token_ids(self, choice: Mapping[str, Any]) -> tuple[int, ...] | None:
        ids = choice.get("token_ids")
        return None if ids is None else tuple(ids)


@pytest.fixture
def server() -> Iterator[Loopback]:
    with Loopback() as running:
        yield running


def complete(
    server: Loopback, request: ServerRequest = REQUEST, kind: ServerKind | None = None, **options: Any
) -> ServerCompletion:
    with ServerClient(ServerAddress("spec", server.url, **options)) as client:
        return client.complete(request, kind or ServerKind())


def refusal(server: Loopback, request: ServerRequest = REQUEST, **options: Any) -> str:
    """The one sentence of a request that fails."""
    with pytest.raises(ServerError) as caught:
        complete(server, request, **options)
    sentence = str(caught.value)
    assert sentence.isprintable() and len(sentence) < 500 and sentence[-1] in ".!?"
    assert "spec" in sentence and "Traceback" not in sentence and "httpx" not in sentence
    return sentence


def test_a_text_and_its_usage(server: Loopback) -> None:
    answer, run = server.answer({"prompt": "a b", "temperature": 0, "max_tokens": 6}), complete(server)
    assert run.text == "".join(answer.pieces)
    assert (run.token_ids, run.token_count, run.counted_by) == (None, 6, USAGE)
    assert (run.prompt_tokens, run.finish, run.finish_reason) == (2, FinishReason.LENGTH, "length")
    sent = server.posts()[-1].body
    assert (sent["model"], sent["prompt"], sent["max_tokens"], sent["temperature"]) == ("tiny", "a b", 6, 0)
    assert "seed" not in sent and sent["stream_options"] == {"include_usage": True}


def test_tokens_are_counted_by_ids_and_not_by_chunks(server: Loopback) -> None:
    server.faults = Faults(tokens_per_chunk=4, usage=False)
    run = complete(server, kind=WithIds())
    assert run.token_ids == tuple(server.answer({"prompt": "a b", "temperature": 0, "max_tokens": 6}).ids)
    assert (run.token_count, run.counted_by) == (6, IDS)
    without = complete(server)
    assert (without.token_count, without.counted_by) == (None, UNCOUNTED)
    assert without.decode_tokens_per_second is None


def test_token_ids_and_chats_as_prompts(server: Loopback) -> None:
    run = complete(server, ServerRequest((5, 6, 7), 3, temperature=0.5, seed=9), kind=WithIds())
    sent = server.posts()[-1]
    assert sent.path == "/v1/completions" and sent.body["prompt"] == [5, 6, 7] and sent.body["seed"] == 9
    assert run.prompt_tokens == 3
    messages = ({"role": "user", "content": "hi"},)
    server.stops_after = 2
    chat = complete(server, ServerRequest(Chat(messages), 5))
    sent = server.posts()[-1]
    assert sent.path == "/v1/chat/completions" and sent.body["messages"] == list(messages)
    assert chat.finish is FinishReason.STOP and chat.text.count(" w") == 2


def test_arrivals_are_those_of_the_pieces(server: Loopback) -> None:
    server.faults = Faults(first_delay=0.2, chunk_delay=0.05)
    run = complete(server)
    assert run.first_seconds is not None and run.decode_seconds is not None
    assert 0.2 <= run.first_seconds < run.seconds
    assert 0.05 <= run.decode_seconds <= run.seconds - run.first_seconds  # the first piece may be read late
    assert run.decode_tokens_per_second == pytest.approx(5 / run.decode_seconds)


def completion_of(*arrivals: tuple[float, Piece], usage: int | None = None) -> ServerCompletion:
    pieces = tuple(replace(piece, seconds=seconds) for seconds, piece in arrivals)
    return ServerCompletion("", pieces, FinishReason.LENGTH, "length", 9.0, usage_tokens=usage)


def test_decode_speed_leaves_out_the_tokens_of_the_first_piece() -> None:
    with_ids = completion_of((1.0, Piece("ab", (1, 2))), (3.0, Piece("cde", (3, 4, 5, 6))))
    assert with_ids.decode_tokens_per_second == 2.0
    counted = completion_of((1.0, Piece("a")), (3.0, Piece("bc")), usage=7)
    assert counted.decode_tokens_per_second == 3.0
    assert completion_of((1.0, Piece("all of it")), usage=7).decode_tokens_per_second is None
    partly = completion_of((1.0, Piece("a", (1,))), (2.0, Piece("b")), usage=3)
    assert (partly.token_ids, partly.token_count) == (None, 3)


FAULTS = {
    "a status": (Faults(status=400, message="max_tokens\x1b[31m is\ntoo large"), "too large"),
    "a loading server": (Faults(status=503, message="Loading model"), "503"),
    "a redirect": (Faults(redirect="http://127.0.0.1:1/"), "elsewhere"),
    "a page": (Faults(html=True), "text/html instead of a stream of events"),
    "a text": (Faults(content_type="text/plain"), "with text/plain instead"),
    "a whole answer": (Faults(content_type="application/json"), "with application/json instead of a stream of events"),
    "headers that trickle": (Faults(trickles="headers"), "took too long"),
    "an error that trickles": (Faults(status=500, trickles="body"), "500"),
    "no JSON": (Faults(broken_json=True), "JSON"),
    "odd JSON": (Faults(odd_json=True), "completion"),
    "no events": (Faults(broken_sse=True), "before the text was complete"),
    "an error in the stream": (Faults(error_in_stream=True), "the engine has failed"),
    "a cut stream": (Faults(cut_after=3), "before the text was complete"),
    "a cut chunk": (Faults(cut_after=3, abrupt=True), "ended the connection"),
    "a reset": (Faults(cut_after=3, reset=True), "ended the connection"),
    "a text without end": (Faults(wordy=True), "more than the 6 tokens"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failure_is_one_sentence_and_the_next_request_works(server: Loopback, name: str) -> None:
    server.faults, expected = FAULTS[name]
    assert expected in refusal(server, model="tiny", timeout=1.0)
    assert len(server.posts()) == 1  # nothing is tried twice
    server.faults = Faults()
    assert complete(server).token_count == 6


def test_a_silent_server(server: Loopback) -> None:
    server.faults = Faults(silent=True)
    assert "took too long" in refusal(server, model="tiny", timeout=0.3)
    server.faults = Faults(chunk_delay=5.0)
    assert "took too long" in refusal(server, timeout=0.3)


def test_a_server_that_dies_and_comes_back(server: Loopback) -> None:
    server.faults = Faults(die_after=3)
    with ServerClient(ServerAddress("spec", server.url)) as client:
        with pytest.raises(ServerError, match="ended the connection"):
            client.complete(REQUEST, ServerKind())
        assert not client.is_ready()
        with pytest.raises(ServerError, match="cannot be reached"):
            client.complete(REQUEST, ServerKind())
        server.faults = Faults()
        server.revive()
        assert client.is_ready()
        assert client.complete(REQUEST, ServerKind()).token_count == 6


def test_ctrl_c_keeps_what_has_arrived_and_ends_the_request(server: Loopback) -> None:
    server.faults = Faults(chunk_delay=0.05)
    seen: list[str] = []

    def watch(piece: Piece) -> None:
        seen.append(piece.text)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with ServerClient(ServerAddress("spec", server.url)) as client:
        run = client.complete(ServerRequest("a b", 500), ServerKind(), watch)
    assert run.finish is FinishReason.INTERRUPTED and run.text == "".join(seen)
    assert run.seconds < 5


def test_models_and_pages(server: Loopback) -> None:
    with ServerClient(ServerAddress("spec", server.url)) as client:
        assert client.models() == ["tiny"] and client.is_ready()
        assert client.get_text("/health") == "OK" and client.get_json("/health") is None
        assert client.get_json("/props") is None and recognise(client).name == "openai"
        server.pages["/props"] = (200, "application/json", json.dumps({"n_ctx": 5}))
        assert client.get_json("/props") == {"n_ctx": 5}
        server.pages["/v1/models"] = (200, "application/json", json.dumps({"data": [{"id": "a"}, {"id": "b\x1b"}]}))
        with pytest.raises(ServerError, match="model=") as caught:
            client.model()
        assert "\x1b" not in str(caught.value)
        server.pages["/health"] = (503, "application/json", '{"error": {"message": "Loading model"}}')
        assert not client.is_ready()


def test_a_key_is_sent_and_comes_back_nowhere(server: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    server.key, server.texts = KEY, (" my key is sk-4f9", "a1c77", "e2b0, it", " is")
    seen: list[Piece] = []
    with ServerClient(ServerAddress("spec", server.url, key="SERVER_KEY")) as client:
        run = client.complete(REQUEST, ServerKind(), seen.append)
    assert server.posts()[-1].headers["authorization"] == f"Bearer {KEY}"
    assert run.text.startswith(" my key is [key], it is w") and run.text.endswith(seen[-1].text)
    server.faults = Faults(status=400, message=f"bad header: Bearer {KEY}")
    assert "header: Bearer [key]" in refusal(server, key="SERVER_KEY")
    server.faults = Faults(content_type=f"text/{KEY}")
    assert "with text/[key] instead" in refusal(server, key="SERVER_KEY")
    server.faults = Faults()
    assert "401" in refusal(server) and "key=VARIABLE" in refusal(server)


def test_a_key_in_an_answer_that_is_not_http_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(f"Bearer {KEY}\r\n\r\n".encode())

        Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = ServerClient(ServerAddress("spec", url, key="SERVER_KEY"))
        with client, pytest.raises(ServerError, match=r"without a valid .*Bearer \[key\]") as caught:
            client.models()
    assert KEY not in str(caught.value)


def test_lines_end_at_line_feeds_only_and_have_a_bound() -> None:
    """Texts may contain what Python's `splitlines` takes for the end of a line; bytes may be cut anywhere."""
    text = "a\u2028b\x85c\u00e4"
    event = json.dumps({"choices": [{"text": text, "finish_reason": "stop"}]}, ensure_ascii=False)
    data = f": comment\r\n\r\ndata:{event}\r\n\r\ndata: [DONE]\r\n\r\ndata: nonsense\n".encode()
    for size in (1, 7, len(data)):
        stream = AnswerStream(ServerAddress("spec", "http://127.0.0.1:1"), ServerKind(), REQUEST)
        for start in range(0, len(data), size):
            list(stream.add(data[start : start + size], 0.5))
        assert stream.completion(0.5).text == text
    stream = AnswerStream(ServerAddress("spec", "http://127.0.0.1:1"), ServerKind(), REQUEST)
    with pytest.raises(ServerError, match="spec reported an error: no memory, after 0 characters"):
        list(stream.add(b'error: {"code": 500, "message": "no memory"}\n', 0.5))
    with pytest.raises(ServerError, match="a line of more than 8 MB"):
        list(stream.add(b"data: " + bytes(MAX_LINE), 0.5))


@pytest.mark.parametrize("part", ["headers", "body"])
def test_a_page_that_trickles_ends(part: str, server: Loopback) -> None:
    server.faults = Faults(trickles=part)
    client = ServerClient(ServerAddress("spec", server.url, timeout=0.3))
    with client, pytest.raises(ServerError, match="took too long"):
        client.get_text("/metrics")


def test_an_answer_ends_at_its_last_event(server: Loopback) -> None:
    server.faults = Faults(trickles="end")
    assert complete(server).token_count == 6


@pytest.mark.parametrize("count", [10**400, 10**15, 7, 0, -1, True, "6", None, [6]])
def test_counts_that_cannot_be_true_are_unknown(count: Any, server: Loopback) -> None:
    server.faults = Faults(usage=False)
    server.extras = lambda request, answer: {"usage": {"completion_tokens": count, "prompt_tokens": count}}
    run = complete(server)
    assert run.text and run.token_count is None and run.counted_by == UNCOUNTED
    assert run.prompt_tokens in (None, 7, 0) and run.decode_tokens_per_second is None
    server.extras = lambda request, answer: {"usage": "six"}
    assert complete(server).token_count is None


def test_token_ids_outside_the_vocabulary_are_unknown(server: Loopback) -> None:
    ids = server.answer({"prompt": "a b", "temperature": 0, "max_tokens": 6}).ids
    assert complete(server, replace(REQUEST, vocabulary=max(ids) + 1), WithIds()).token_ids == tuple(ids)
    run = complete(server, replace(REQUEST, vocabulary=max(ids)), WithIds())
    assert (run.token_ids, run.token_count, run.counted_by) == (None, 6, USAGE)


def test_a_model_is_named_as_the_server_names_it(server: Loopback) -> None:
    server.model = "tiny\ud800"
    assert complete(server).token_count == 6


def test_events_without_content_take_no_memory() -> None:
    stream = AnswerStream(ServerAddress("spec", "http://127.0.0.1:1"), ServerKind(), REQUEST)
    data = f'data: {{"choices": [], "padding": "{"x" * 10_000}"}}\n\n'.encode()
    tracemalloc.start()
    for _ in range(500):
        list(stream.add(data, 0.5))
    assert tracemalloc.get_traced_memory()[0] < 200_000
    tracemalloc.stop()


def test_only_choice_0_is_read_and_content_types_have_no_case(server: Loopback) -> None:
    other = {"index": 1, "text": "no", "finish_reason": "stop"}
    server.faults = Faults(content_type="Text/Event-Stream; charset=utf-8")
    whole = complete(server).text
    server.extras = lambda request, answer: {"choices": [other, {"index": 0, "text": "", "finish_reason": "length"}]}
    assert complete(server).text == whole
    server.extras = lambda request, answer: {"choices": [{"text": "", "finish_reason": "content_filter"}]}
    assert "content_filter" in refusal(server)


def test_fields_are_left_out_and_renamed(server: Loopback) -> None:
    request = replace(REQUEST, seed=3)
    complete(server, request, omit="seed,stream_options", rename="max_tokens:max_completion_tokens")
    sent = server.posts()[-1].body
    assert sent["max_completion_tokens"] == 6 and not {"seed", "stream_options", "max_tokens"} & set(sent)
    server.faults = Faults(status=400, message="unknown field seed")
    assert "omit=FIELD" in refusal(server)
    for message in (  # of llama.cpp, vLLM and transformers
        "the request exceeds the available context size (2048 tokens), try increasing it",
        "This model's maximum context length is 2048 tokens. However, you requested 3000 tokens.",
        "'max_tokens' is too large: 3000.",
    ):
        server.faults = Faults(status=400, message=message)
        assert "omit=" not in (sentence := refusal(server)) and message.rstrip(".") in sentence


def test_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = str(Path(__file__).with_name("certificate.pem"))
    with Loopback(certificate=certificate) as server:
        assert "ca=FILE or SSL_CERT_FILE" in refusal(server)
        assert complete(server, ca=certificate).token_count == 6
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        assert complete(server).token_count == 6
        assert "none.pem cannot be read" in refusal(server, ca="none.pem")
