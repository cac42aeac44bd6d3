"""/server start and stop: a server program of the user becomes a row of the comparison and ends with the session."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_checkpoints import eagle3_tensors, speculators_config, write_checkpoint
from fakes import Screen, records_of
from servers.launches import fake_program, family, gone
from servers.loopback import Loopback
from servers.server_sessions import server_session

from utils.commands.server import free_name
from utils.models.embedded import EMBEDDED_HEAD
from utils.repl.repl_session import ReplSession, Verdict
from utils.servers.address import ServerAddress
from utils.servers.processes.programs import NGRAM, Launch


@pytest.fixture
def session(view: Screen, tmp_path: Path) -> Iterator[ReplSession]:
    made = server_session(view, records=tmp_path / "r.jsonl")
    yield made
    made.close()


def start(tmp_path: Path, rest: str = "", behaviour: str = "serve") -> str:
    return f"/server start llama.cpp a.gguf program={fake_program(tmp_path / behaviour, behaviour)} {rest}"


def test_a_started_server_answers_prompts(session: ReplSession, view: Screen, tmp_path: Path) -> None:
    assert session.handle(start(tmp_path, "name=plain")) is Verdict.DONE
    assert session.handle(start(tmp_path, "drafter=ngram draft=3 baseline=plain")) is Verdict.DONE
    shown = view.take()[0]
    assert "no speculation" in shown and "ngram3" in shown
    assert session.handle("Hello") is Verdict.DONE
    started, _, plain, spec = records_of(tmp_path / "r.jsonl")
    assert plain["strategy"] == "server plain" and spec["strategy"] == "server llama.cpp-ngram3"
    assert plain["text"] == spec["text"] and spec["same_as_baseline"]
    figures = started["findings"][0]
    assert figures["server"] == "plain" and figures["url"] == plain["server"]["url"]
    assert "--metrics" in figures["command"] and figures["kind"] == "llama.cpp"


@pytest.mark.parametrize("line", ["/server stop plain", "/server remove plain"])
def test_a_server_that_leaves_the_comparison_ends(
    line: str, session: ReplSession, view: Screen, tmp_path: Path
) -> None:
    before = family()
    session.handle(start(tmp_path, "name=plain"))
    begun = family() - before
    assert len(begun) == 2 and session.handle(line) is Verdict.DONE and gone(begun)  # the guard, too
    assert session.handle("/server") is Verdict.DONE and "There is no server" in "".join(view.take())


def test_a_server_that_dies_between_prompts_is_explained(session: ReplSession, view: Screen, tmp_path: Path) -> None:
    before = family()
    session.handle(start(tmp_path, "name=plain"))
    assert session.handle("Hello") is Verdict.DONE and "ended" not in "".join(view.take())
    begun = family() - before
    for server in (process for process in begun if not process.children()):  # not its guard
        server.kill()
    assert session.handle("Hello again") is Verdict.FAILED
    assert "plain ended with status" in " ".join("".join(view.take()).split())
    assert session.handle("/server") is Verdict.DONE and "(it has ended)" in view.take()[0]


def test_servers_end_with_the_session(session: ReplSession, tmp_path: Path) -> None:
    before = family()
    session.handle(start(tmp_path))
    begun = family() - before
    session.close()
    assert begun and gone(begun)


def test_a_failure_shows_the_log_and_leaves_the_session_as_it_was(
    session: ReplSession, view: Screen, tmp_path: Path
) -> None:
    assert session.handle(start(tmp_path, behaviour="fail")) is Verdict.FAILED
    shown = "".join(view.take())
    assert "ended with status 3" in shown and "no such model" in shown and "\x1b[31m" not in shown
    assert not session.harness.state.servers.addresses
    assert session.handle(start(tmp_path)) is Verdict.DONE


@pytest.mark.parametrize(
    ("rest", "part"),
    [
        ("name=1plain", "not a name for a server"),
        ("baseline=other", "baseline"),
        ("draft=two drafter=ngram", "draft=:"),
        ("draft=3", "needs a drafter"),
        ("drafts=3", "Did you mean draft"),
        ("-- '", "quotation mark"),
        ("and more", "one word too many"),
        ("name=a name=b", "given twice"),
        ("-- --host 0.0.0.0", "loopback"),
        ("-- --api-key sk-4f9a1c77e2b0", "a key cannot follow --"),
        ("-- --api-key=sk-4f9a1c77e2b0", "a key cannot follow --"),
        ("-- '--hf-token' sk-4f9a1c77e2b0", "a key cannot follow --"),
        ("'", "quotation mark"),
    ],
)
def test_arguments_that_are_refused(rest: str, part: str, session: ReplSession, view: Screen, tmp_path: Path) -> None:
    before = family()
    assert session.handle(start(tmp_path, rest)) is Verdict.FAILED
    shown = " ".join("".join(view.take()).split())
    assert part in shown and "sk-4f9" not in shown and family() == before


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("/server start", "name a server kind: llama.cpp, vllm"),
        ("/server start lama.cpp", "Did you mean llama.cpp"),
        ("/server stop", "there is none"),
        ("/server stop other", "not started by this session; name a server that was: there is none"),
    ],
)
def test_lines_that_name_nothing(line: str, part: str, session: ReplSession, view: Screen) -> None:
    assert session.handle(line) is Verdict.FAILED
    assert part in " ".join("".join(view.take()).split())


def test_names_that_are_made_are_free() -> None:
    assert free_name(Launch("vllm", "a"), []) == "vllm"
    assert free_name(Launch("vllm", "a"), ["vllm", "vllm-2"]) == "vllm-3"
    assert free_name(Launch("vllm", "a", drafter=NGRAM, draft=2), ["vllm"]) == "vllm-ngram2"
    assert free_name(Launch("vllm", "a", drafter="b", draft=0), []) == "vllm"


def test_a_server_whose_list_of_models_fails_still_answers(view: Screen) -> None:
    with Loopback(pages={"/v1/models": (500, "text/plain", "Internal Server Error")}) as server:
        session = server_session(view, ServerAddress("one", server.url, model="tiny"))
        assert session.handle("Hello") is Verdict.DONE, view.take()
        server.pages["/v1/models"] = (401, "text/plain", "no key")
        other = server_session(view, ServerAddress("one", server.url, model="tiny"))
        assert other.handle("Hello") is Verdict.FAILED and "401" in "".join(view.take())


@pytest.mark.parametrize(
    ("kind", "config", "words", "method"),
    [
        ("vllm", speculators_config({}), "", "eagle3"),
        ("vllm", speculators_config({}), "method=draft_model", "draft_model"),
        ("vllm", None, "", "draft_model"),  # a folder without a drafter of the table
    ],
)
def test_published_drafters_get_the_program_s_word(
    kind: str, config: Any, words: str, method: str, session: ReplSession, tmp_path: Path
) -> None:
    folder = tmp_path / "drafter"
    if config is None:
        write_checkpoint(folder, {"model_type": "llama"}, {"norm.weight": torch.ones(2)})
    else:
        write_checkpoint(folder, config, eagle3_tensors({}))
    program = fake_program(tmp_path / kind, name=kind)
    session.handle(f"/server start {kind} tiny drafter={folder} {words} program={program}")
    (record,) = records_of(tmp_path / "r.jsonl")
    command = record["findings"][0]["command"]
    assert json.loads(command[-1])["method"] == method


def test_a_drafter_that_a_program_cannot_load_is_refused(session: ReplSession, view: Screen, tmp_path: Path) -> None:
    program = fake_program(tmp_path / "vllm", name="vllm")
    assert session.handle(f"/server start vllm tiny drafter={EMBEDDED_HEAD} program={program}") is Verdict.FAILED
    assert "output head" in view.take()[1]
    assert not session.harness.state.servers.addresses
