"""`make bench-sizes`: files with random weights that the program reads, the watch over memory, and the table."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from fakes import screen
from paths import BENCHMARKS
from tiny import tiny_tokenizer

sys.path.append(str(BENCHMARKS))

import gguf
import numpy as np
import size_models
import size_runs
import sizes
from memory_watch import Bounds, MemoryWatch, end_tree, resident
from size_models import FORMS, GGUF_FORMS, SHAPES, Shape, drafter_of, random_blocks, write_model
from size_runs import LONG, MEDIUM, Figures, Program, RowStopped, prompt_of, run_program

from utils.decode.model_session import ModelSession
from utils.engine.stored_weights import data
from utils.pairs.load_pair import load_pair
from utils.pairs.request import PairRequest

SMALL = Shape(2, 256, 4, 2, 512)
ROOMY = Bounds(memory=20e9, seconds=60, long_prefill=60)
PEER = {"prompt_tokens": 500, "new_tokens": 16, "first_token_seconds": 2.0, "seconds": 3.5}


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.full if index % 2 else ()) for index, form in enumerate(FORMS)]
)
def test_our_loader_reads_every_form(form: str, tmp_path: Path, own_cache: Path) -> None:
    tokenizer = tiny_tokenizer()
    target, drafter = (str(write_model(tmp_path / name, SMALL, form, tokenizer)) for name in ("target", "drafter"))
    pair = load_pair(PairRequest(target, drafter, device="cpu"), print)
    weights = data(pair.target.model.layers[1].mlp.down_proj.weight)
    assert weights.shape == (256, 512)
    assert float(weights.float().std()) == pytest.approx(size_models.SPREAD, rel=0.2)
    pair.engine.use("plain", 1)
    assert torch.isfinite(ModelSession(pair.target).feed([5, 6, 7], keep=1)).all()
    assert pair.tokenizer("a b")["input_ids"] == tokenizer("a b")["input_ids"]


@pytest.mark.parametrize("form", GGUF_FORMS)
def test_random_blocks_have_the_spread_of_weights_and_a_mean_near_zero(form: str) -> None:
    blocks = random_blocks((64, 1024), form, np.random.default_rng(0))
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[form.upper()])
    assert values.shape == (64, 1024)
    assert values.std() == pytest.approx(size_models.SPREAD, rel=0.2)
    assert abs(values.mean()) < 0.2 * size_models.SPREAD


@pytest.mark.parametrize("size", SHAPES)
def test_shapes_have_the_sizes_that_they_are_named_after(size: float) -> None:
    assert sum(SHAPES[size].count(49152)) / 1e9 == pytest.approx(size, rel=0.22)
    assert all(width % 256 == 0 for width in (SHAPES[size].hidden, SHAPES[size].inner))
    assert drafter_of(size) < size or size == min(SHAPES)


def allocating(megabytes: int) -> subprocess.Popen[bytes]:
    """A process whose child allocates so much memory and keeps it."""
    child = f"import time; block = b'x' * {megabytes}_000_000; time.sleep(30)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    return subprocess.Popen([sys.executable, "-c", parent])


def test_the_watch_sees_the_memory_of_a_child_and_leaves_it_alone_below_the_limit() -> None:
    process = allocating(200)
    watch = MemoryWatch(process.pid, ROOMY)
    try:
        until(lambda: watch.peak > 200e6)
        assert watch.peak < 400e6
        assert process.poll() is None and not watch.stopped
    finally:
        end_tree(process.pid)
        watch.close()
        process.wait()
    assert resident(process.pid) == 0


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [(Bounds(0.1e9, 60, 60), "stopped at 0.1 GB"), (Bounds(20e9, 0.2, 60), "stopped after 0 s")],
)
def test_the_watch_ends_a_tree_above_its_bounds(bounds: Bounds, reason: str) -> None:
    process = allocating(200)
    watch = MemoryWatch(process.pid, bounds)
    assert process.wait(timeout=20) != 0
    watch.close()
    assert watch.stopped == reason


def until(is_done: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_program_that_cannot_start_gives_its_last_message(tmp_path: Path) -> None:
    program = Program(["--dtype", "float33"], tmp_path, ROOMY)
    with pytest.raises(RowStopped, match=r"ended with status 2: .*float33"):
        program.wait_for_prompt()
    program.close()


class Answers:
    """In the place of the program: replies to prompts with the records of an engine."""

    started: ClassVar[list["Answers"]] = []

    def __init__(self, arguments: object, folder: Path, bounds: Bounds) -> None:
        self.seconds, self.watch = 0.0, MemoryWatch(-1, bounds)
        self.lines: list[str] = []
        self.started.append(self)
        (folder / "cache").mkdir(exist_ok=True)
        (folder / "cache" / "engine.json").write_text("12345")

    def wait_for_prompt(self) -> None:
        self.seconds = 8.0 / len(self.started)

    def resident(self) -> int:
        return 2_000_000_000

    def ask(self, prompt: str, *settings: str) -> dict[str, object]:
        self.lines += settings
        engine = {"kind": "invariant", "threads": 2, "verified": True}
        costs = "at 200 1.1; verify 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8; model 0.2"
        return PEER | {"engine": engine, "settings": {"costs": costs}}

    def close(self) -> None:
        self.watch.peak = 3_000_000_000 // len(self.started)
        self.watch.close()


def test_figures_are_those_of_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "started", [])
    monkeypatch.setattr(size_runs, "Program", Answers)
    figures = run_program([], tiny_tokenizer(), tmp_path, ROOMY)
    assert (figures.starts, figures.peak, figures.resident) == ([8.0, 4.0], 3_000_000_000, 2_000_000_000)
    assert (figures.disk, figures.verify) == (5, {5: 1.4, 9: 1.8})
    assert figures.step == pytest.approx(0.1)
    assert figures.prefill == {MEDIUM: 250.0, LONG: 250.0}
    assert figures.note == "invariant, 2 threads, equal bits"
    slow = run_program([], tiny_tokenizer(), tmp_path, Bounds(20e9, 60, long_prefill=10))
    assert set(slow.prefill) == {MEDIUM}
    assert "/speculative off" in Answers.started[-1].lines


def test_a_prompt_has_the_number_of_tokens_that_was_asked_for() -> None:
    text, ids = prompt_of(tiny_tokenizer(), 500)
    assert len(ids) == 500 and "lighthouse" in text and "\n" not in text


def test_rows_of_the_table() -> None:
    row = sizes.Row(1.7, "safetensors", sizes.PROGRAM, "bfloat16")
    figures = Figures([60.0, 12.5], int(6e9), int(4.5e9), 0, 0.2, {5: 1.2}, {MEDIUM: 120.0}, "invariant, 2 threads")
    cells = sizes.cells(sizes.result_of(row, figures, (3_400_000_000, 600_000_000), 34e9))
    assert cells == [
        *("1.7", "safetensors", "program, bfloat16", "60.0", "12.5", "6.00", "0.95", "4.50", "0.00"),
        *("200.0", "1.20", "-", "120", "-", "50%", "invariant, 2 threads"),
    ]
    figures.prefill[LONG] = 100.0
    longer = sizes.result_of(row, figures, (3_400_000_000, 600_000_000), 34e9)
    # Keys and values of 24 layers with 32 heads of 64 values each, 4 bytes for each.
    assert longer["peak_bound"] == pytest.approx(1.2 * 4e9 + 1.5e9 + LONG * 2 * 24 * 32 * 64 * 4)
    stopped = sizes.cells(sizes.result_of(row, Figures(peak=int(12e9), note="stopped at 12.0 GB"), (1, 1), 1e9))
    assert (stopped[3], stopped[9], stopped[-1]) == ("-", "-", "stopped at 12.0 GB")
    peer = sizes.result_of(sizes.Row(1.7, "q4_0", sizes.LLAMA, "gguf"), Figures([3.0]), (10, 10), 1e9)
    assert sizes.cells(peer)[2:5] == ["llama.cpp", "-", "3.0"]
    assert len(cells) == len(sizes.HEADINGS)


def test_a_whole_run_writes_a_table_and_all_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "SHAPES", {0.36: SMALL, 0.05: SMALL})
    monkeypatch.setattr(sizes, "embedded_folder", lambda report: tmp_path)
    monkeypatch.setattr(sizes, "make_renderer", lambda interactive: screen().renderer)
    monkeypatch.setattr(sizes, "READ_BYTES", 1_000_000)
    measured = []

    def run(arguments: list[str], *others: object) -> Figures:
        assert Path(arguments[1]).exists() and Path(arguments[3]).exists()
        measured.append(arguments[5])
        return Figures([1.0, 0.5], 1000, 500, 0)

    monkeypatch.setattr(sizes, "run_program", run)
    monkeypatch.setattr(sizes, "run_peer", lambda worker, *others: Figures([0.5], note=worker[0]))
    tiny_tokenizer().save_pretrained(tmp_path)
    out, work = tmp_path / "out", tmp_path / "work"
    work.mkdir()
    flags = ["--sizes", "0.36", "--forms", "safetensors,q4_0", "--rows", "int8,float32,gguf", "--limit", "2"]
    sizes.main([*flags, "--output", str(out), "--work", str(work)])
    assert measured == ["int8", "float32", "gguf"]
    assert not list(work.iterdir())
    written = json.loads((out / "sizes.json").read_text())
    assert [result["arm"] for result in written["results"]][:3] == [
        "program, int8",
        "program, float32",
        "generate, float32",
    ]
    assert (out / "sizes.md").read_text().splitlines()[0] == sizes.first_line(written)
    sizes.main([*flags, "--output", str(out), "--minutes", "0"])
    assert len(measured) == 3
    assert "not run" in (out / "sizes.md").read_text()


@pytest.mark.parametrize("flags", [["--sizes", "5"], ["--forms", "q9"], ["--rows", "int8,int3"]])
def test_unknown_words_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sizes.flags_of(flags)
    assert "is not one of" in capsys.readouterr().err
