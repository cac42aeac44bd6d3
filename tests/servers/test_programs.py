"""Command lines of server programs: loopback only, their flags for drafts, and launches that are refused."""

import json
import re
import sys
from pathlib import Path

import pytest
from paths import ROOT
from servers.launches import fake_program

from utils.errors import UserError
from utils.servers.processes.llama_child import parser
from utils.servers.processes.local_servers import OUR_VARIABLES, environment
from utils.servers.processes.programs import DEFAULT_DRAFT, NGRAM, PROGRAMS, Launch, command_line

KINDS = tuple(PROGRAMS)


def line(kind: str, folder: Path, **values: object) -> list[str]:
    """The arguments after the program."""
    program = fake_program(folder, name=kind)
    return command_line(Launch(kind, "target", program=program, **values), 1234)[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_every_program_listens_on_loopback_only(kind: str, tmp_path: Path) -> None:
    words = line(kind, tmp_path)
    assert words[words.index("--host") + 1] == "127.0.0.1" and words[words.index("--port") + 1] == "1234"
    assert not [word for word in words if word.startswith(("--spec", "0.0.0.0"))]


def test_drafts_of_llama_cpp(tmp_path: Path) -> None:
    model = " ".join(line("llama.cpp", tmp_path, drafter="small.gguf", draft=5))
    assert "--spec-type draft-simple --spec-draft-n-max 5 --spec-draft-model small.gguf" in model
    ngram = " ".join(line("llama.cpp", tmp_path, drafter=NGRAM))
    assert f"--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m {DEFAULT_DRAFT}" in ngram
    assert "--spec-type draft-eagle3" in " ".join(line("llama.cpp", tmp_path, drafter="e.gguf", method="draft-eagle3"))


def test_targets_of_llama_cpp_are_files_or_repositories(tmp_path: Path) -> None:
    program = fake_program(tmp_path)
    file = command_line(Launch("llama.cpp", "folder/tiny.gguf", program=program), 1)
    assert file[1:5] == ["--model", "folder/tiny.gguf", "--alias", "tiny"]
    assert command_line(Launch("llama.cpp", "org/tiny-GGUF", program=program), 1)[1:3] == ["--hf-repo", "org/tiny-GGUF"]


def test_drafts_of_vllm(tmp_path: Path) -> None:
    words = line("vllm", tmp_path, drafter="small", draft=5)
    assert words[:2] == ["serve", "target"] and "--no-enable-prefix-caching" in words
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {"method": "draft_model", "model": "small", "num_speculative_tokens": 5}
    ngram = json.loads(line("vllm", tmp_path, drafter=NGRAM, draft=2)[-1])
    assert ngram["method"] == "ngram" and ngram["num_speculative_tokens"] == 2 and "model" not in ngram


def test_a_python_that_has_vllm_takes_the_model_as_an_option(tmp_path: Path) -> None:
    program = fake_program(tmp_path, name="python3.12")
    words = command_line(Launch("vllm", "target", program=program), 1)
    assert words[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "target"] and "serve" not in words


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_length_of_zero_means_no_speculation(kind: str, tmp_path: Path) -> None:
    assert line(kind, tmp_path, drafter="small", draft=0) == line(kind, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_further_flags_are_passed_on(kind: str, tmp_path: Path) -> None:
    assert line(kind, tmp_path, flags=("--threads", "2"))[-2:] == ["--threads", "2"]


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"draft": 3}, "needs a drafter"),
        ({"method": "eagle"}, "needs a drafter"),
        ({"program": "/nowhere/llama-server"}, "not a program"),
        ({"flags": ("--host=0.0.0.0",)}, "loopback"),
    ],
)
def test_launches_that_are_refused(values: dict[str, object], part: str, tmp_path: Path) -> None:
    base = {"kind": "llama.cpp", "model": "target", "program": fake_program(tmp_path)}
    with pytest.raises(UserError, match=part):
        command_line(Launch(**base | values), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_programs_that_are_not_installed(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("utils.servers.processes.programs.find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"^{re.escape(kind)} is not installed .*program=PATH"):
        command_line(Launch(kind, "target"), 1)


def test_llama_server_is_preferred_to_xllamacpp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("utils.servers.processes.programs.find_spec", lambda name: object())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_line(Launch("llama.cpp", "a.gguf"), 1)[1].endswith("llama_child.py")
    server = fake_program(tmp_path)
    assert command_line(Launch("llama.cpp", "a.gguf"), 1)[0] == server


@pytest.mark.parametrize(
    "values",
    [
        *({}, {"drafter": NGRAM}, {"drafter": "small.gguf", "draft": 2}),
        {"drafter": "small.gguf", "flags": ("--spec-draft-sampling", "probabilistic")},
    ],
)
def test_the_server_of_xllamacpp_takes_these_flags(values: dict[str, object], tmp_path: Path) -> None:
    launch = Launch("llama.cpp", "a.gguf", program=fake_program(tmp_path), **values)
    options = parser().parse_args([*command_line(launch, 7)[1:], "--ctx-size", "64"])
    assert (options.model, options.host, options.port, options.ctx_size) == ("a.gguf", "127.0.0.1", 7, 64)
    assert options.spec_draft_sampling is (True if "flags" in values else None)


def test_servers_do_not_inherit_how_our_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OUR_VARIABLES.items():
        assert f'os.environ.setdefault("{name}", "{value}")' in (ROOT / "infer.py").read_text(encoding="utf-8")
        monkeypatch.setenv(name, value)
    assert not OUR_VARIABLES.keys() & environment().keys()
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert environment()["OMP_WAIT_POLICY"] == "ACTIVE"
