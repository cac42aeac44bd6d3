"""/server text above temperature 0: sampled texts of a server and of its baseline as samples of one distribution."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from fakes import Screen
from servers.loopback import Faults, Loopback
from servers.loopback_values import Answer
from servers.server_sessions import server_session

from utils.repl.runner import Verdict
from utils.servers.address import ServerAddress

VLLM = (200, "application/json", '{"data": [{"id": "tiny", "owned_by": "vllm"}]}')


@dataclass(slots=True)
class Sampler(Loopback):
    """A server that samples each token: token 0 with a probability, otherwise one of four others."""

    favourite: float = 0.4

    def answer(self, body: Any) -> Answer:
        answer = Loopback.answer(self, body)
        if not body.get("temperature"):
            return answer
        random = Random(str((body.get("seed"), body.get("messages", body.get("prompt")))))
        ids = [0 if random.random() < self.favourite else random.randrange(1, 5) for _ in answer.ids]
        return replace(answer, ids=ids, pieces=[f" w{token}" for token in ids])


def checked(view: Screen, favourite: float = 0.4, *, ids: bool = True, words: str = "") -> tuple[str, list[Any]]:
    """What the screen shows, and the sampled requests that each server got."""
    pages: Any = {"/v1/models": VLLM}
    with Sampler(pages=pages) as plain, Sampler(pages=pages, favourite=favourite) as fast:
        plain.faults = fast.faults = Faults(ids=ids)
        addresses = ServerAddress("base", plain.url), ServerAddress("spec", fast.url, baseline="base")
        session = server_session(view, *addresses)
        for line in ("/temperature 0.7", "/length 12"):
            assert session.handle(line) is Verdict.DONE
        view.take()
        assert session.handle(f"/server text spec repeats=2 concurrency=4 limit=2 {words}") is Verdict.DONE
        shown = " ".join(view.take()[0].split())
        bodies = [[request.body for request in server.posts()] for server in (plain, fast)]
        return shown, [[body for body in of if body.get("temperature")] for of in bodies]


@pytest.mark.parametrize("ids", [True, False])
def test_equal_distributions(ids: bool, view: Screen) -> None:
    shown, sampled = checked(view, ids=ids)
    assert "No difference was found" in shown and "do not have" not in shown
    for bodies in sampled:
        assert len(bodies) == 2 * 24 and {body["temperature"] for body in bodies} == {0.7}
        assert all(body.get("max_tokens", body.get("max_completion_tokens")) == 12 for body in bodies)
    # Equal seeds would make the texts of both servers equal, which two samples never are.
    seeds = [body["seed"] for bodies in sampled for body in bodies]
    assert len(set(seeds)) == len(seeds) == 96


@pytest.mark.parametrize(("favourite", "ids"), [(0.9, True), (0.9, False), (0.0, True)])
def test_another_distribution_is_found(favourite: float, ids: bool, view: Screen) -> None:
    shown, _ = checked(view, favourite, ids=ids)
    assert "do not have the distribution" in shown and "No difference" not in shown


def test_the_number_of_samples(view: Screen) -> None:
    _, sampled = checked(view, words="samples=3")
    assert [len(bodies) for bodies in sampled] == [6, 6]


def test_greedy_sessions_compare_greedy_texts_only(view: Screen) -> None:
    pages: Any = {"/v1/models": VLLM}
    with Sampler(pages=pages) as plain, Sampler(pages=pages) as fast:
        addresses = ServerAddress("base", plain.url), ServerAddress("spec", fast.url, baseline="base")
        session = server_session(view, *addresses)
        session.handle("/server text spec repeats=2 limit=1")
        completions = [request for request in fast.posts() if "completions" in request.path]
        assert len(completions) == 2 * 2 and not any(request.body["temperature"] for request in completions)
