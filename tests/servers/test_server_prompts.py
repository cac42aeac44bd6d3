"""Token ids as prompts: only where the server's tokenizer agrees with the local one. Ids are compared, too."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, records_of, table_pair
from servers import loopback
from servers.loopback import Loopback
from servers.loopback_values import Answer
from servers.server_sessions import server_session

from utils.decode.model_info import vocabulary_size
from utils.repl.repl_session import Verdict
from utils.servers import connection
from utils.servers.address import ServerAddress
from utils.servers.kinds.completion import Chat, ServerRequest
from utils.servers.kinds.server_kind import ServerKind, ServerReader


class Tokenizing(ServerKind):
    """A kind that takes and gives ids, with the tokenizer of tiny_pair and perhaps one id more."""

    def __init__(self, tokenizer: Any, extra: tuple[int, ...]) -> None:
        self._tokenizer, self._extra = tokenizer, extra

    takes_token_ids = True

    def tokens(self, server: ServerReader, text: str | Chat, *, special: bool = False) -> tuple[int, ...] | None:
        return (*self._tokenizer(text, add_special_tokens=False)["input_ids"], *self._extra)

    def further_fields(self, request: ServerRequest) -> dict[str, Any]:
        return {"return_token_ids": True}

    def token_ids(self, choice: Mapping[str, Any]) -> tuple[int, ...] | None:
        return tuple(choice["token_ids"]) if "token_ids" in choice else None


@pytest.fixture
def two() -> Iterator[tuple[Loopback, Loopback]]:
    with Loopback() as plain, Loopback() as spec:
        yield plain, spec


@pytest.mark.parametrize("extra", [(), (5,)])
def test_ids_are_sent_if_both_tokenizers_agree(
    two: tuple[Loopback, Loopback],
    extra: tuple[int, ...],
    view: Screen,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = table_pair()
    monkeypatch.setattr(connection, "recognise", lambda client: Tokenizing(pair.tokenizer, extra))
    servers = ServerAddress("plain", two[0].url), ServerAddress("spec", two[1].url, baseline="plain")
    session = server_session(view, *servers, pair=pair, monkeypatch=monkeypatch, records=tmp_path / "r.jsonl")
    ids = session.harness.prompt_ids("Hello", session.settings)

    answer, last = Loopback.answer, vocabulary_size(pair.target) - 1
    monkeypatch.setattr(loopback, "VOCABULARY", last)

    def other(server: Loopback, body: Mapping[str, Any]) -> Answer:
        """The text that the other server gives, from another fourth token."""
        found = answer(server, body)
        ids = [*found.ids[:3], last, *found.ids[4:]] if server is two[1] else found.ids
        return replace(found, ids=ids)

    monkeypatch.setattr(Loopback, "answer", other)
    assert session.handle("Hello") is Verdict.DONE, view.take()
    body, row = two[1].posts()[-1].body, records_of(tmp_path / "r.jsonl")[-1]
    if extra:
        assert "prompt" not in body and body["messages"][-1] == {"role": "user", "content": "Hello"}
        assert row["server"]["prompt_form"] == "messages"
    else:
        assert body["prompt"] == ids and row["server"]["prompt_form"] == "token ids"
        assert row["prompt_tokens"] == len(ids)
    assert row["tokens_counted_by"] == "token ids" and row["token_ids"][3] == last
    assert (row["same_as_baseline"], row["first_difference"], row["first_difference_in"]) == (False, 3, "tokens")
    assert "differs at token 4" in view.take()[0]
