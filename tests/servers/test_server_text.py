"""/server text: equal servers, servers that differ, that are not deterministic, and that depend on the load."""

import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen
from servers.loopback import Faults, Loopback
from servers.loopback_values import Answer
from servers.server_sessions import server_session

from utils.commands.servers.server_text import ALONE, TIE, UNKNOWN, Output, TextTrial
from utils.decode.steps import FinishReason
from utils.repl.repl_session import Verdict
from utils.servers.address import ServerAddress
from utils.servers.kinds.completion import Piece, ServerCompletion, ServerRequest
from utils.servers.kinds.vllm import VllmKind

VLLM = (200, "application/json", '{"data": [{"id": "tiny", "owned_by": "vllm"}]}')
LINE = "/server text spec repeats=2 concurrency=3 limit=2"


@dataclass(slots=True)
class Odd(Loopback):
    """A server whose third token is another one under a condition: always, on every second request, under load, or for
    prompts about pears.
    """

    when: str = ""
    count: int = 0

    def answer(self, body: Any) -> Answer:
        # No zero-argument super() in a class with slots.
        answer = Loopback.answer(self, body)
        self.count += 1
        odd = {
            "always": True,
            "sometimes": self.count % 2 == 0,
            "busy": self._at_once > 1,
            "pears": "pears" in str(body),
        }
        if not odd.get(self.when):
            return answer
        ids, pieces = list(answer.ids), list(answer.pieces)
        ids[2], pieces[2] = 7, " other"
        return replace(answer, ids=ids, pieces=pieces)


def checked(view: Screen, base: str = "", spec: str = "", line: str = LINE) -> tuple[str, Odd]:
    """What the screen shows of a check of two servers, and the second one."""
    pages: Any = {"/v1/models": VLLM}
    faults = Faults(chunk_delay=0.01)
    with Odd(when=base, pages=pages, faults=faults) as plain, Odd(when=spec, pages=pages, faults=faults) as fast:
        addresses = ServerAddress("base", plain.url), ServerAddress("spec", fast.url, baseline="base")
        session = server_session(view, *addresses)
        session.handle(line)
        return " ".join(view.take()[0].split()), fast


def test_equal_servers(view: Screen) -> None:
    shown, server = checked(view)
    assert (
        "The text of spec is that of base: equal for 2 prompts (4 requests to each server of up to 6 tokens)" in shown
    )
    assert "With 3 requests at once the texts stay the same." in shown
    assert len(server.posts()) >= 8 and server.most_at_once > 1
    assert all(request.body["temperature"] == 0 for request in server.posts() if "max_tokens" in request.body)


def test_requests_are_greedy_also_where_the_kind_has_no_top_k(view: Screen) -> None:
    """The session's top-k is not sent, so a server of an unknown kind is no reason to refuse the check."""
    with Odd() as server:
        session = server_session(view, ServerAddress("spec", server.url))
        assert session.handle("/processor topk 1 40") is Verdict.DONE
        assert session.handle(LINE) is Verdict.DONE
    assert "Deterministic: 4 requests for 2 prompts" in " ".join(view.take()[0].split())
    assert server.posts() and all("top_k" not in request.body for request in server.posts())


def test_a_server_with_another_text(view: Screen) -> None:
    shown, _ = checked(view, spec="always")
    assert "The text of spec is not that of base for 2 of 2 prompts" in shown
    assert "token 3" in shown and "deterministic" not in shown.lower()
    # It is the same text under load, so load changes nothing.
    assert "With 3 requests at once the texts stay the same." in shown and ", 3 at once" not in shown


@pytest.mark.parametrize("which", ["base", "spec"])
def test_a_server_that_is_not_deterministic_alone(view: Screen, which: str) -> None:
    shown, _ = checked(view, **{which: "sometimes"}, line="/server text spec repeats=3 concurrency=1 limit=1")
    assert f"Not deterministic: {which} answered" in shown and "is that of" not in shown


def test_a_baseline_that_depends_on_the_load(view: Screen) -> None:
    shown, _ = checked(view, base="busy")
    assert "The text of spec is that of base" in shown
    assert "base does so without speculation" in shown


def test_a_server_without_a_baseline(view: Screen) -> None:
    with Odd(pages={"/v1/models": VLLM}) as server:
        server_session(view, ServerAddress("spec", server.url)).handle(LINE)
    assert "Deterministic: 4 requests for 2 prompts" in " ".join(view.take()[0].split())


@pytest.mark.parametrize("race", [False, True])
def test_prompts_whose_texts_differed_are_the_ones_that_are_examined(view: Screen, tmp_path: Path, race: bool) -> None:
    prompts = ["About apples", "About pears", "About figs", "More pears"]
    (tmp_path / "p.txt").write_text("\n".join(prompts))
    pages: Any = {"/v1/models": VLLM}
    with Odd(pages=pages) as plain, Odd(when="pears", pages=pages) as fast:
        addresses = ServerAddress("base", plain.url), ServerAddress("spec", fast.url, baseline="base")
        session = server_session(view, *addresses)
        for line in [f"/race 1 {tmp_path / 'p.txt'}"] if race else prompts:
            session.handle(line)
        fast.when = ""  # the second time all texts are equal
        before, count = view.take(), len(fast.posts())
        session.handle("/server text spec repeats=2 concurrency=1")
        sent = str([request.body for request in fast.posts()[count:]])
        assert "About pears" in sent and "More pears" in sent and "apples" not in sent and "figs" not in sent
        assert "is that of base" in "".join(view.take()), before
        session.handle("About pears")
        count = len(fast.posts())
        session.handle("/server text spec repeats=2 concurrency=1")
        sent = str([request.body for request in fast.posts()[count:]])
        assert "More pears" in sent and "About pears" not in sent


@pytest.mark.parametrize("argument", ["", "nobody", "spec repeats=1", "spec concurrency=x", "spec no-such-file.txt"])
def test_bad_arguments_get_one_sentence(view: Screen, argument: str) -> None:
    session = server_session(view, ServerAddress("spec", "http://127.0.0.1:9"))
    session.handle(f"/server text {argument}")
    shown = "".join(view.take())
    assert "Traceback" not in shown and 0 < len(shown.splitlines()) < 8


def test_a_server_that_dies_under_load_leaves_no_threads(view: Screen) -> None:
    before = threading.active_count()
    with Odd(pages={"/v1/models": VLLM}) as plain, Odd(pages={"/v1/models": VLLM}) as fast:
        fast.faults = Faults(die_after=2)
        addresses = ServerAddress("base", plain.url), ServerAddress("spec", fast.url, baseline="base")
        server_session(view, *addresses).handle(LINE)
    shown = "".join(view.take())
    assert "spec" in shown and "is that of" not in shown
    assert threading.active_count() <= before + 4  # the loopback servers' own, which end by themselves


class Model:
    """A connection to a model that answers 1, and in a prefill of several tokens another one."""

    kind = VllmKind()
    address = ServerAddress("base", "http://127.0.0.1:1")

    def __init__(self, prefill: int) -> None:
        self.client, self.prefill = self, prefill
        self.prompts: list[tuple[int, ...]] = []

    def get_text(self, path: str) -> None:
        """There are no counters."""

    def complete(self, request: ServerRequest, kind: VllmKind, watch: object) -> ServerCompletion:
        assert isinstance(request.prompt, tuple) and request.max_tokens == 1
        self.prompts.append(request.prompt)
        piece = Piece("a", (self.prefill,), seconds=0.1)
        return ServerCompletion("a", (piece,), FinishReason.LENGTH, "length", 0.1)


@pytest.mark.parametrize(
    ("ours", "prefill", "cause"),
    [
        ((1, 1, 2), 2, TIE),
        ((1, 1, 2), 1, UNKNOWN),
        ((1, 1, 2), 3, UNKNOWN),
        ((1, 1), 2, UNKNOWN),  # one text merely ends earlier
    ],
)
def test_a_tie_is_a_token_that_the_baseline_takes_itself_in_a_prefill(
    ours: tuple[int, ...], prefill: int, cause: str
) -> None:
    model: Any = Model(prefill)
    theirs, other = Output("aaa", (1, 1, 1)), Output("aab", ours)
    trial = TextTrial([model], ("Hi",), {"base": [ServerRequest((8, 9), 3)]}, 2, 1)
    trial.outputs[ALONE, "base"] = [[theirs, theirs]]
    assert trial.cause(0, other, 2) == cause
    assert model.prompts == ([(8, 9, 1, 1)] if len(ours) > 2 else [])


def test_outputs_without_ids_are_compared_by_characters() -> None:
    one, other = Output("abc", (1, 2)), Output("abd", None)
    assert one.difference(other) == (2, "character")
    assert one.difference(Output("xyz", (1, 2))) is None  # the ids decide where both have them
