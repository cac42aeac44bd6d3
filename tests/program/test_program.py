"""The program: its flags, start, exit status, streams and records."""

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import records_of
from fixed_speeds import only_engines, prefer
from paths import ROOT
from process import program
from tiny import save_folder, tiny_t5, tiny_tokenizer

import infer
from utils.engine import engine

HELP_WITHOUT_TORCH = """
import runpy, sys
sys.argv = ["infer.py", "--help"]
try:
    runpy.run_path("infer.py", run_name="__main__")
except SystemExit:
    pass
assert not {"torch", "transformers", "httpx"} & set(sys.modules)
"""


def test_help_and_version_need_no_heavy_imports() -> None:
    for flag in ("--help", "--version"):
        result = program(flag)
        assert result.returncode == 0 and result.stdout and not result.stderr
    assert subprocess.run([sys.executable, "-c", HELP_WITHOUT_TORCH], cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--device", "tpu"],
        ["--dtype", "int3"],
        ["--quantize", "int2"],
        ["--seed", "-1"],
        ["--seed", "4294967296"],
        ["--seed", "x"],
        ["--pair", "nonsense"],
        ["--pair", "embedded", "--target", "x"],
    ],
)
def test_wrong_flags_are_usage_errors(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        infer.main(flags)
    assert ended.value.code == 2 and capsys.readouterr().out == ""


def test_a_usage_error_is_the_status_of_the_process() -> None:
    result = program("--no-such-flag")
    assert result.returncode == 2 and "Traceback" not in result.stderr and result.stdout == ""


def test_the_second_start_uses_what_the_first_one_tested_and_measured(
    folder: Path, own_cache: Path, tmp_path: Path, main: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_engines(monkeypatch, "plain", "invariant")
    prefer("invariant")
    monkeypatch.setattr(engine, "times_have_changed", lambda *arguments: False)
    flags = ("--target", folder, "--engine", "auto", "--threads", "1", "--json", tmp_path / "runs.jsonl")
    flags += ("-c", "/length 4", "-c", "Hello")
    for _ in range(2):
        result = main(*flags)
        assert result.returncode == 0, result.stderr
    first, second = (records_of(tmp_path / "runs.jsonl")[row] for row in (0, 3))
    assert not first["engine"]["tested_on"] and second["engine"]["tested_on"] in result.stderr
    assert second["engine"]["verified"] and second["settings"]["costs"] == first["settings"]["costs"]
    (own_cache / infer.RESULTS).write_bytes(b"\x00" * 1000)
    assert main(*flags).returncode == 0
    assert not records_of(tmp_path / "runs.jsonl")[6]["engine"]["tested_on"]


@pytest.mark.parametrize("odd", ["pipe", ".", "a\0b", "none/file"])
def test_records_need_a_regular_file(odd: str, tmp_path: Path, main: Any) -> None:
    os.mkfifo(tmp_path / "pipe")  # would wait for a reader
    result = main("--target", "nowhere", "--json", tmp_path / odd, "-c", "Hello")
    assert result.returncode == 1 and "--json" in result.stderr and "Illegal seek" not in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_output_that_cannot_be_written_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--target", str(folder), "--engine", "plain", "-c", "/length 2", "-c", "Hello"]
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert infer.main(arguments) == 1
        full.flush()  # as at the end of the process: nothing is left that fails
    errors = capsys.readouterr().err
    assert "No space left" in errors.splitlines()[-1] and "Traceback" not in errors


def test_closed_output_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert infer.main(["--target", str(folder), "-c", "Hello"]) == 1
    assert "closed" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", None)
    assert infer.main(["--target", str(folder), "-c", "Hello"]) == 1


def test_characters_that_the_terminal_lacks_are_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(written, encoding="ascii", errors="strict"))
    assert infer.main(["--target", str(folder), "-c", "/length 5", "-c", "h\u00e9llo"]) == 0
    sys.stdout.flush()
    text = written.getvalue().decode("ascii")
    assert "Target only" in text and "> h?llo" in text


@pytest.mark.parametrize(
    "flags",
    [
        ["--target", "{here}/nothing"],
        ["--target", "{here}"],
        ["--target", ""],
        ["--target", "{folder}", "--drafter", ""],
        ["--target", "{folder}", "--drafter", "layers:9"],
        ["--target", "{folder}", "--drafter", "layers:x"],
        ["--target", "{folder}", "--json", "{here}/no/such/folder.jsonl"],
        ["--target", "{folder}", "--device", "cuda:7"],
        ["--target", "{folder}", "--prompts", "{here}/none"],
    ],
)
def test_what_cannot_be_loaded_or_written_is_reported_with_status_one(
    flags: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = infer.main([flag.format(here=tmp_path, folder=folder) for flag in flags] + ["-c", "Hello"])
    results, messages = capsys.readouterr()
    assert status == 1 and results == ""
    last = messages.strip().splitlines()[-1]
    assert last.endswith(".") and "Traceback" not in messages and "Hello" not in messages


def test_an_encoder_decoder_target_runs_without_a_drafter(tmp_path: Path, main: Any) -> None:
    save_folder(tmp_path / "t5", tiny_t5(vocab_size=300), tiny_tokenizer(300, chat=False))
    file = tmp_path / "runs.jsonl"
    result = main("--target", tmp_path / "t5", "--json", file, "-c", "/length 5", "-c", "Hello")
    assert result.returncode == 0, result.stderr
    assert "no drafter" in result.stderr.lower()
    assert [row["strategy"] for row in records_of(file)] == ["ngram", "target"] and all(
        row["same_as_baseline"] for row in records_of(file)
    )


# The first strategy shows its title before it runs.
INTERRUPTED = ("/speculative off", "/ngram off", "/length 4", "Hello")
INTERRUPTED += ("/length 240", "/cache off", "/target off", "/beams 16", "Hello", "Hello")


def interrupted_flags(folder: Path, file: Path) -> list[str]:
    flags = [word for line in INTERRUPTED for word in ("-c", line)]
    return ["--target", str(folder), "--engine", "plain", "--json", str(file), *flags]


def is_interrupted(file: Path) -> bool:
    rows = [(row["strategy"], row["finish"] == "interrupted") for row in records_of(file)]
    return rows == [("target", False), ("beam", True)]


class Titles(StringIO):
    """Standard output that says when the last strategy begins."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def write(self, text: str) -> int:
        if "Beam search" in text:
            self.begun.set()
        return super().write(text)


def test_an_interrupt_keeps_partial_results_and_gives_status_130(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program inside this process, begun as a background job of a shell, which ignores SIGINT."""
    shown, ended = Titles(), threading.Event()

    def interrupt() -> None:
        if shown.begun.wait(60) and not ended.wait(0.2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "argv", ["infer.py", *interrupted_flags(folder, tmp_path / "runs.jsonl")])
    handler, threads = signal.signal(signal.SIGINT, signal.SIG_IGN), torch.get_num_threads()
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(SystemExit) as status:
            runpy.run_path(str(ROOT / "infer.py"), run_name="__main__")
    finally:
        ended.set()
        signal.signal(signal.SIGINT, handler)
        torch.set_num_threads(threads)
    assert status.value.code == 130 and "Traceback" not in capsys.readouterr().err
    assert is_interrupted(tmp_path / "runs.jsonl")


@pytest.mark.full
def test_an_interrupt_ends_the_process(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "infer.py"), *interrupted_flags(folder, file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    while "Beam search" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors, errors
    assert is_interrupted(file)


def test_a_gate_runs_the_records_of_the_program_again(main: Any, folder: Path, tmp_path: Path) -> None:
    """Whatever the speeds are, neither drafts nor texts become worse. Half of the speed is hardly ever lost."""
    file, flags = tmp_path / "base.jsonl", ("--target", folder, "--drafter", folder)
    assert main(*flags, "--json", file, "-c", "/length 8", *("-c", "Hello there") * 3).returncode == 0
    result = main(*flags, "--gate", file, "--tolerance", "50", "--repeats", "1")
    last = result.stdout.splitlines()[-1]
    assert result.returncode in (0, 3) and last.startswith("gate: ") and "other texts" not in last
    assert main(*flags, "--gate", tmp_path / "none").returncode == 1
