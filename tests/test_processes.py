"""Several processes of one run: prompts shared out, records in one file, one screen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fakes import records_of
from tiny import save_folder, tiny_llama, tiny_tokenizer

from utils.errors import UserError
from utils.models.devices import choose_device
from utils.records import RecordFile

ROOT = Path(__file__).parent.parent


def test_processes_share_out_the_prompts_and_the_first_one_speaks(tmp_path: Path) -> None:
    """As a launcher starts them: by what stands in the environment."""
    save_folder(tmp_path / "tiny", tiny_llama(vocab_size=300), tiny_tokenizer())
    prompts = [f"prompt {number}" for number in range(5)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    flags = ["--target", str(tmp_path / "tiny"), "--drafter", "layers:1", "-c", "/length 3", "--json", str(tmp_path / "records.jsonl")]
    command = [sys.executable, str(ROOT / "infer.py"), *flags, "--prompts", str(tmp_path / "prompts.txt")]
    several = [
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
    said = [process.communicate(timeout=200) for process in several]
    assert [process.returncode for process in several] == [0, 0], said
    records = records_of(tmp_path / "records.jsonl")
    assert sorted({record["prompt"] for record in records}) == prompts and len(records) == 3 * len(prompts)
    groups = [records[place : place + 3] for place in range(0, len(records), 3)]
    assert all(len({record["prompt"] for record in group}) == 1 for group in groups)
    assert said[0][0].count("> prompt") == 3 and said[1] == ("", "")


@pytest.mark.parametrize(
    ("words", "device"), [({}, "cuda"), ({"WORLD_SIZE": "4", "LOCAL_RANK": "3"}, "cuda:3"), ({"WORLD_SIZE": "x"}, "cuda")]
)
def test_each_process_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch, words: dict[str, str], device: str) -> None:
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

            def write(self, data: bytes) -> int:
                writes.append(len(data))
                return int(real.write(data[:100_000]))

        return Watched()

    monkeypatch.setattr(Path, "open", watched)
    file.append([{"text": "é" * 20_000}, {"text": "b"}])
    assert len(writes) == 1 and len(records_of(tmp_path / "records.jsonl")) == 2
    with pytest.raises(UserError, match="No space left"):
        file.append([{"text": "x" * 200_000}])
    assert json.loads((tmp_path / "records.jsonl").read_text().splitlines()[1]) == {"text": "b"}
