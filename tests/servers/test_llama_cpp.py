"""llama.cpp's own server, started by this program: it answers, drafts as configured, and is gone afterwards."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import Screen, records_of
from servers.launches import family, gone, started
from servers.real import embedded_file, llama_launch, llama_python, running_llama
from servers.server_sessions import server_session

from utils.errors import UserError
from utils.repl.repl_session import Verdict
from utils.servers.client import ServerClient
from utils.servers.kinds import recognise
from utils.servers.kinds.completion import Chat, ServerCompletion, ServerRequest

pytestmark = pytest.mark.servers
REPEATING = "Count: one two three four five six. one two three four five six. one two three four five six. one two"
LENGTH = 24


def answer(client: ServerClient, prompt: str | Chat = REPEATING) -> ServerCompletion:
    return client.complete(ServerRequest(prompt, LENGTH, ignore_eos=True), recognise(client))


def drafts(completion: ServerCompletion) -> tuple[int, int]:
    """The drafts and the accepted ones, in llama.cpp's own words."""
    timings = completion.figures["timings"]
    return timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)


def counter(client: ServerClient, name: str) -> float:
    page = client.get_text("/metrics") or ""
    found = re.search(rf"^llamacpp:{name} (\S+)$", page, re.MULTILINE)
    assert found is not None, page
    return float(found[1])


def test_plain_decoding_and_what_is_left_after_it() -> None:
    before = family()
    with running_llama() as (client, server):
        assert client.models() == ["smollm2-135m-instruct-gguf"]  # not the path of the file
        completion = answer(client)
        assert completion.token_count == completion.figures["timings"]["predicted_n"] == LENGTH
        assert completion.finish_reason == "length" and drafts(completion) == (0, 0)
        chat = answer(client, Chat(({"role": "user", "content": "Say hello."},)))
        assert chat.token_count == LENGTH and chat.text.strip()
        assert counter(client, "tokens_predicted_total") == 2 * LENGTH
        begun = family() - before
        assert begun and server.is_running
    assert gone(begun)


def test_ngram_drafts_have_the_given_length() -> None:
    with running_llama(drafter="ngram", draft=3) as (client, _):
        drafted, accepted = drafts(answer(client))
        assert 0 < accepted <= drafted
        assert drafted <= 3 * counter(client, "spec_decode_num_drafts_total")


def test_the_model_as_its_own_drafter_is_accepted() -> None:
    with running_llama(drafter="self", draft=4) as (client, _):
        drafted, accepted = drafts(answer(client, "The sea is"))
        rounds = counter(client, "spec_decode_num_drafts_total")
        assert accepted >= 0.9 * drafted and drafted <= 4 * rounds
        assert accepted + rounds >= LENGTH - 2  # nearly every token is from a round


def test_requests_at_the_same_time() -> None:
    with running_llama(parallel=3, context=3072) as (client, _), ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda number: answer(client, f"{number} is a number and"), range(3)))
        assert [completion.token_count for completion in answers] == [LENGTH] * 3


def test_lengths_and_load_of_a_session(view: Screen, tmp_path: Path) -> None:
    session = server_session(view, records=tmp_path / "r.jsonl")
    start = f"/server start llama.cpp {embedded_file()} program={llama_python()}"
    flags = " -- --ctx-size 2048 --parallel 4 --threads 1"
    lines = (
        f"{start} name=plain{flags}",
        f"{start} name=spec drafter=ngram draft=4 baseline=plain{flags}",
        "/length 16",
        REPEATING,
        "/server load spec draft=0,4 concurrency=1 requests=4 fixed=16 turns=1 seconds=9000",
        "/server load spec concurrency=1,4 requests=4 fixed=16 turns=1 seconds=9000",
    )
    try:
        for line in lines:
            assert session.handle(line) is Verdict.DONE, view.take()
    finally:
        session.close()
    lengths, load = (row for row in records_of(tmp_path / "r.jsonl") if row["record"] == "server load")
    plain, four = lengths["findings"]
    assert not plain["drafted"] and four["accepted"] > 0 and four["tokens_per_target_forward"] > 1
    assert len(plain["tokens"]) == len(four["speedups"]) == 1
    assert [(row["server"], row["concurrency"]) for row in load["findings"]] == [
        *(("spec", 1), ("plain", 1), ("spec", 4), ("plain", 4)),
    ]
    for row in load["findings"]:
        sent = 4 if row["concurrency"] == 1 else 3 * 4
        assert row["tokens"] == [sent * 16] and row["failed"] == 0  # every answer has its full length
        assert row["other_tokens"] == [0]
        assert bool(row["accepted"]) == bool(row["accepted_by_position"]) == (row["server"] == "spec")


def test_a_file_that_is_no_model_is_explained(tmp_path: object) -> None:
    launch = llama_launch()
    broken = f"{tmp_path}/broken.gguf"
    with open(broken, "wb") as file:
        file.write(b"GGUF" + bytes(100))
    with pytest.raises(UserError, match=r"(?s)ended with status \d+.*Its log ends with:.*model"):
        started("llama", replace(launch, model=broken))
