"""`make gpu-check` on the CPU with tiny models: every section runs, and nothing that is missing or fails ends it."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from paths import BENCHMARKS

sys.path.append(str(BENCHMARKS))

import gpu
import gpu_sections
import torch
from gpu_adapter import adapt_transformers
from gpu_guard import NotRun, Row, attempted, run_section

from utils.engine import cuda_graph


def check(tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    code = gpu.main([*flags, "--out", str(tmp_path / "gpu.json")])
    return code, json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))


@pytest.mark.full
def test_every_section_runs_on_the_cpu_with_tiny_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "LIMITS", dict.fromkeys(gpu.LIMITS, 300))
    monkeypatch.setattr(gpu_sections, "TIMED", {"Llama 135M": "float32"})
    monkeypatch.setattr(gpu_sections, "DTYPES", {"float32": torch.float32, "bfloat16": torch.bfloat16})
    monkeypatch.setattr(gpu_sections, "TESTED", (2, 5, 12, 17))
    monkeypatch.setattr(gpu_sections, "RULES", ("coupled",))
    monkeypatch.setattr(cuda_graph, "TESTED", (1, 4))  # tests/utils/engine has tests of its self-test
    monkeypatch.setattr(cuda_graph, "_has_equal_bits", lambda model: False)
    monkeypatch.setattr(gpu, "MODULES", ("sampling", "a_module_that_is_not_there"))
    code, record = check(tmp_path, "--device", "cpu", "--tiny")
    sections = {section["name"]: section for section in record["sections"]}
    assert code == 0 and all(section["status"] == "ran" for section in sections.values()), record
    rows = [row for name, section in sections.items() if name != "modules" for row in section["rows"]]
    assert not any("failed" in row for row in rows), rows
    tested = {(row["dtype"], row["engine"]): row for row in sections["self-test"]["rows"]}
    assert set(tested) == {(dtype, engine) for dtype in ("float32", "bfloat16") for engine in gpu_sections.ENGINES}
    assert tested["float32", "invariant"]["other bits at widths"] == "none"
    assert all(row["from plain"] < 1e-3 for (dtype, _), row in tested.items() if dtype == "float32")
    speeds = {row["by"]: row for row in sections["steps"]["rows"]}
    drafts = {engine: speeds.pop(f"a draft, {engine}") for engine in ("plain", "cuda_graph")}
    assert [(engine, row["own forward"]) for engine, row in drafts.items()] == [("plain", False), ("cuda_graph", True)]
    assert list(speeds) == ["transformers", "plain", "cuda_graph", "generate"]
    assert all(row["ms"] > 0 and row["of the limit"] > 0 for row in speeds.values())
    assert all(speeds[way]["v(9)"] > 0 for way in ("transformers", "plain", "cuda_graph"))
    exact = [row for row in sections["texts"]["rows"] if row["dtype"] == "float32"]
    assert len(exact) == 4
    assert all(row[name] == "16 of 16" for row in exact for name in ("target again", "layers:2", "n-gram"))
    assert {row["kind"] for row in sections["quantizations"]["rows"]} == {"bnb-int8", "nf4", "int8", "int4"}
    assert all(row["rounds"] > 0 for row in sections["placement"]["rows"])
    assert "6 sections were measured on cpu." in capsys.readouterr().out


def test_a_machine_without_cuda_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "MODULES", ("json", "a_module_that_is_not_there"))
    code, record = check(tmp_path)
    modules, *others = record["sections"]
    assert code == 0 and [row["module"] for row in modules["rows"]] == ["a_module_that_is_not_there"]
    assert {(section["status"], section["reason"]) for section in others} == {("not run", "torch finds no CUDA device")}
    assert "Nothing was measured on cuda" in capsys.readouterr().out


def test_it_runs_without_torch(tmp_path: Path) -> None:
    """`-S` hides all installed packages."""
    command = [sys.executable, "-S", str(BENCHMARKS / "gpu.py"), "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "No module named 'torch'" in done.stdout and not done.stderr
    assert json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["machine"]["torch"].startswith("missing")


def failing_after_one_row(error: BaseException) -> Iterator[Row]:
    yield {"first": 1}
    raise error


@pytest.mark.parametrize(
    ("error", "status"), [(NotRun("no"), "not run"), (ImportError("no"), "not run"), (TypeError("no"), "failed")]
)
def test_rows_before_an_error_are_kept(error: Exception, status: str) -> None:
    result = run_section("name", lambda: failing_after_one_row(error), 10)
    assert (result.status, result.rows, result.has_failed) == (status, [{"first": 1}], status == "failed")
    assert "no" in result.reason

    def raises() -> Row:
        raise error

    assert attempted({"key": 2}, raises)["key"] == 2 and status in attempted({}, raises)


def test_a_section_ends_when_its_time_is_over() -> None:
    def endless() -> Iterator[Row]:
        yield {"first": 1}
        while True:
            try:
                time.sleep(5)
            except Exception:  # a handler inside the section must not keep it alive
                continue

    result = run_section("name", endless, 0.2)
    assert (result.status, result.rows) == ("out of time", [{"first": 1}]) and result.seconds < 4


def test_caches_of_older_versions_are_adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer:
        keys: object = None

        def lazy_initialization(self, keys: object) -> None:
            self.keys = keys

        def crop(self, length: int) -> None:
            self.keys = None

    cache = type("Cache", (), {})
    older, caches = ModuleType("transformers"), ModuleType("transformers.cache_utils")
    vars(older)["PretrainedConfig"] = dict
    vars(caches).update(Cache=cache, DynamicLayer=Layer)
    monkeypatch.setitem(sys.modules, "transformers", older)
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", caches)
    adapt_transformers()
    adapt_transformers()  # does nothing more
    layer: Any = Layer()
    layer.lazy_initialization(5, 6)
    layer.crop(0)
    assert layer.keys == 5
    layer.crop(-1)
    assert layer.keys is None and cache().is_croppable and vars(older)["PreTrainedConfig"] is dict
