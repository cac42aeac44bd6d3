"""Records: those of a prompt are appended in one piece, so that several programs may share a file."""

from pathlib import Path

import pytest
from fakes import records_of

from utils.comparison.records import RecordFile
from utils.errors import UserError


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
