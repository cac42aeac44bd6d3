"""A folder with a tiny model, and the program on it."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch
from tiny import save_folder, tiny_llama, tiny_tokenizer

import infer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_folder(path, tiny_llama(vocab_size=300, num_hidden_layers=2), tiny_tokenizer(300))
    return path


@pytest.fixture(autouse=True)
def _cache(own_cache: Path) -> None:
    """Results of the engine's self-test are not shared with other tests, nor with the user's program."""


@pytest.fixture
def main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Like `program`, but inside this process, which saves the imports, and with the plain engine unless named."""

    def run(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(stdin.encode())))
        engine = [] if "--engine" in arguments else ["--engine", "plain"]
        status = infer.main([*map(str, arguments), *engine])
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)
