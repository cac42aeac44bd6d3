"""llama.cpp's own server with the server kind of this program: ids, acceptance, and a text that stays the same."""

from dataclasses import replace

import pytest
from servers.real import running_llama

from utils.servers.client import ServerClient
from utils.servers.kinds import recognise
from utils.servers.kinds.completion import IDS, Chat, ServerAcceptance, ServerCompletion, ServerRequest

pytestmark = pytest.mark.servers
LENGTH = 24
REQUEST = ServerRequest("one two three four one two three four one two three", LENGTH, ignore_eos=True)


def asked(client: ServerClient, request: ServerRequest) -> tuple[ServerCompletion, ServerAcceptance | None]:
    kind = recognise(client)
    before = kind.counters(client)
    completion = client.complete(request, kind)
    return completion, kind.acceptance(completion, before, kind.counters(client))


def test_ids_of_plain_decoding() -> None:
    with running_llama() as (client, _):
        kind = recognise(client)
        assert kind.name == "llama.cpp"
        completion, acceptance = asked(client, REQUEST)
        assert acceptance is None and completion.counted_by == IDS and completion.token_count == LENGTH
        ids = kind.tokens(client, str(REQUEST.prompt))
        chat = kind.tokens(client, Chat(({"role": "user", "content": "Hi"},)))
        assert ids is not None and chat is not None and len(chat) > 5
        again, _ = asked(client, replace(REQUEST, prompt=ids))
        assert again.token_ids == completion.token_ids


def test_drafts_change_the_figures_and_not_the_text() -> None:
    with running_llama() as (client, _):
        plain, _ = asked(client, REQUEST)
    with running_llama(drafter="self", draft=4) as (client, _):
        drafted, acceptance = asked(client, REQUEST)
    assert drafted.token_ids == plain.token_ids
    assert acceptance is not None and acceptance.valid and acceptance.rounds is not None
    assert acceptance.accepted == sum(accepted for accepted, _ in acceptance.by_position)
    assert acceptance.by_position[0][1] == acceptance.rounds and acceptance.accepted > 0.8 * acceptance.drafted
    # The prefill, the passes with drafts, and at most one step at the end that has no room for drafts.
    assert acceptance.forwards is not None and 0 <= acceptance.forwards - 1 - acceptance.rounds <= 1
