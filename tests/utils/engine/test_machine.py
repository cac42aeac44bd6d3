"""The machine as records name it, and its numbers of threads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from utils.engine import machine
from utils.engine.machine import cpu_model, machine_facts


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (
            "processor : 0\nmodel name\t: One (R) CPU @ 2.0GHz\n\nprocessor : 1\nmodel name\t: Two\n",
            "One (R) CPU @ 2.0GHz",
        ),
        ("processor : 0\nBogoMIPS : 50\n\nHardware : BCM2835\nModel : Raspberry Pi\n", "BCM2835"),
    ],
)
def test_the_processor_is_named(info: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(info)
    assert cpu_model(file) == expected


def test_a_machine_without_such_a_file_has_a_name_too(tmp_path: Path) -> None:
    assert cpu_model(tmp_path / "none")


def test_the_facts_are_plain_values() -> None:
    facts = machine_facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["memory"] > 0 and facts["threads"] >= 1 and isinstance(facts["gpus"], list)


@pytest.mark.parametrize(("available", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])])
def test_threads_to_try_are_the_powers_of_two_and_all(available: int, counts: list[int]) -> None:
    assert machine.candidate_threads(available) == counts


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # PyTorch has read it at its start
    assert machine.requested_threads() == machine.AVAILABLE_THREADS
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert not machine.requested_threads()
