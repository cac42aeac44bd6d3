"""Multi-process runs: sharded prompts, one record file, one screen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fakes import open_session, records_of, screen
from paths import ROOT
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_tokenizer

from utils.comparison.records import RecordFile
from utils.distributed import broadcast, broadcast_lines, is_tensor_parallel, shard_prompts, shutdown
from utils.errors import UserError
from utils.models.devices import choose_device
from utils.repl.runner import Verdict, explain_error


def test_processes_shard_the_prompts_and_only_rank_zero_prints(tmp_path: Path) -> None:
    """Data parallel, with the environment variables that a launcher sets."""
    save_folder(tmp_path / "tiny", tiny_llama(vocab_size=300), tiny_tokenizer())
    prompts = [f"prompt {number}" for number in range(5)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    flags = [
        "--target",
        str(tmp_path / "tiny"),
        "--drafter",
        "layers:1",
        "-c",
        "/length 3",
        "--json",
        str(tmp_path / "records.jsonl"),
    ]
    command = [sys.executable, str(ROOT / "infer.py"), *flags, "--prompts", str(tmp_path / "prompts.txt")]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    records = records_of(tmp_path / "records.jsonl")
    assert sorted({record["prompt"] for record in records}) == prompts and len(records) == 3 * len(prompts)
    groups = [records[start : start + 3] for start in range(0, len(records), 3)]
    assert all(len({record["prompt"] for record in group}) == 1 for group in groups)
    assert outputs[0][0].count("> prompt") == 3 and outputs[1] == ("", "")


LINES = (
    "/seed 3",
    "/gamma 3",
    "/length 12",
    "/drafter on",
    "Hello",
    "/processor multinomial 0.9",
    "/verify coupled",
    "Hello there",
)


def test_tensor_parallel_processes_write_the_records_of_a_single_process(tmp_path: Path) -> None:
    """Under torchrun with gloo; only rank zero can read the lines."""
    tokenizer, file, saved = tiny_tokenizer(), tmp_path / "records.jsonl", tmp_path / "settings.txt"
    save_folder(tmp_path / "target", tiny_llama(vocab_size=300), tokenizer)
    save_folder(tmp_path / "drafter", tiny_llama(1, vocab_size=300), tokenizer)
    flags = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--json", str(file)]
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(ROOT / "infer.py"),
            *flags,
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        input="\n".join((*LINES, f"/save {saved}")),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("> Hello") == 2 and "2 processes compute target" in run.stderr
    assert saved.read_text()
    made = records_of(file)
    session = open_session(screen(), load(tmp_path / "target", tmp_path / "drafter"), tmp_path / "alone.jsonl")
    for line in LINES:
        assert session.handle(line) is Verdict.DONE
    alone = records_of(tmp_path / "alone.jsonl")
    assert [(record["strategy"], record["token_ids"]) for record in made] == [
        (record["strategy"], record["token_ids"]) for record in alone
    ]
    assert len(made) == 8 and made[0]["drafted"] > 3 and made[0]["engine"]["kind"] == "plain"
    assert made[0]["models"]["memory"] < 0.6 * alone[0]["models"]["memory"] and made[0]["models"]["drafter_memory"]


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("target", {"quantize": "int8"}, "leave --quantize out"),
        ("embedded", {"drafter": "head"}, "--drafter"),
        ("target", {"device": "mps"}, "leave --device out"),
        ("odd", {}, "5 processes"),
        ("t5", {}, "'t5'"),
    ],
)
def test_pairs_that_do_not_support_tensor_parallelism_are_refused(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, target: str, options: dict[str, str], words: str
) -> None:
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "WORLD_SIZE": "5" if target == "odd" else "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    source = {"embedded": "embedded", "odd": shelf / "target"}.get(target, shelf / target)
    assert words in refusal(source, **options)


def test_data_parallel_and_tensor_parallel_launchers_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert is_tensor_parallel() and shard_prompts(["a", "b"]) == ["a", "b"] and shutdown(1) == 0
    with pytest.raises(SystemExit):
        explain_error(screen().renderer, MemoryError())
    explain_error(screen().renderer, UserError("of all"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert (
        not is_tensor_parallel()
        and shard_prompts(["a", "b"]) == ["b"]
        and shutdown(1) == 1
        and broadcast(3) == 3
        and list(broadcast_lines(["x"])) == ["x"]
    )
    explain_error(screen().renderer, MemoryError())


@pytest.mark.parametrize(
    ("words", "device"),
    [({}, "cuda"), ({"WORLD_SIZE": "4", "LOCAL_RANK": "3"}, "cuda:3"), ({"WORLD_SIZE": "x"}, "cuda")],
)
def test_each_process_uses_the_device_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, words: dict[str, str], device: str
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == device


def test_records_of_a_prompt_are_written_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    file = RecordFile(tmp_path / "records.jsonl")
    opened = Path.open

    def watched(self: Path, *arguments: object, **options: object) -> object:
        if arguments != ("ab",):
            return opened(self, *arguments, **options)  # type: ignore[call-overload]
        assert options["buffering"] == 0
        real = opened(self, *arguments, **options)  # type: ignore[call-overload]

        class Watched:
            def __enter__(self) -> "Watched":
                return self

            def __exit__(self, *error: object) -> None:
                real.close()

            def seek(self, *where: int) -> int:
                return int(real.seek(*where))

            def truncate(self, size: int) -> int:
                return int(real.truncate(size))

            def write(self, data: bytes) -> int:
                writes.append(len(data))
                return int(real.write(data[:100_000]))

        return Watched()

    monkeypatch.setattr(Path, "open", watched)
    file.append([{"text": "é" * 20_000}, {"text": "b"}])
    assert len(writes) == 1 and len(records_of(tmp_path / "records.jsonl")) == 2
    with pytest.raises(UserError, match="No space left"):
        file.append([{"text": "x" * 200_000}])
    assert len(records_of(tmp_path / "records.jsonl")) == 2, "half a record was left"
