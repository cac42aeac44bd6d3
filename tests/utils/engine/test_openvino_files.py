"""Converted graphs: stored once, read by later starts, and not held in memory twice. OpenVINO reports nothing."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from openvino_specs import tiny_spec
from paths import ROOT

from utils import artifact_cache
from utils.engine import openvino_cache, openvino_support
from utils.engine.decoder_spec import DecoderSpec
from utils.engine.openvino_engine import unsupported
from utils.engine.openvino_graph import GraphBuilder
from utils.engine.openvino_segments import OpenVinoSegments
from utils.engine.weight_blocks import round_int4
from utils.engine.weight_format import EngineWeights


def head_of(spec: DecoderSpec, folder: Path) -> torch.Tensor:
    segments = OpenVinoSegments(spec, threads=1, folder=folder)
    return segments.logits(torch.ones(1, spec.hidden_size)).clone()


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[GraphBuilder]:
    """Every conversion that is begun."""
    begun: list[GraphBuilder] = []
    original = openvino_cache._graphs
    monkeypatch.setattr(openvino_cache, "_graphs", lambda builder: (begun.append(builder), original(builder))[1])
    return begun


def test_a_second_start_reads_the_files_of_the_first(tmp_path: Path, conversions: list[GraphBuilder]) -> None:
    spec = tiny_spec()
    first = head_of(spec, tmp_path)
    assert torch.equal(head_of(spec, tmp_path), first)
    assert len(conversions) == 1


def test_graphs_that_were_used_last_are_checked_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny_spec()
    turned = replace(spec, head=replace(spec.head, weight=spec.head.weight.flip(0)))
    checked: list[Path] = []
    monkeypatch.setattr(artifact_cache, "check_early", lambda folder, made_from: checked.append(folder))
    for used in (spec, turned, spec):
        for manifest in tmp_path.glob("*/manifest.json"):
            os.utime(manifest, (1e9, 1e9))
        head_of(used, tmp_path)
        artifact_cache.check_newest_early(tmp_path)
    assert checked[0] == checked[2] != checked[1]


def test_files_of_other_weights_are_not_read(tmp_path: Path, conversions: list[GraphBuilder]) -> None:
    spec = tiny_spec()
    first = head_of(spec, tmp_path)
    turned = replace(spec, head=replace(spec.head, weight=spec.head.weight.flip(0)))  # the same rows in another order
    assert torch.equal(head_of(turned, tmp_path), first.flip(1))
    assert torch.equal(head_of(spec, tmp_path), first)
    scaled = replace(spec, layers=tuple(replace(layer, residual_scale=0.5) for layer in spec.layers))
    head_of(scaled, tmp_path)
    assert len(conversions) == 3
    assert len([*tmp_path.iterdir()]) == 3


def test_keys_differ_by_format_and_blocks() -> None:
    spec = tiny_spec()
    block = round_int4(spec.head.weight)
    other = replace(block, scales=block.scales * 2)
    keys = {
        openvino_cache._key(spec, EngineWeights(weights, blocks))
        for weights, blocks in [("float32", None), ("int8", None), ("gguf", {"a": block}), ("gguf", {"a": other})]
    }
    assert len(keys) == 4


def test_damaged_files_are_made_again(tmp_path: Path, conversions: list[GraphBuilder]) -> None:
    spec = tiny_spec()
    first = head_of(spec, tmp_path)
    (path,) = tmp_path.glob("*/head.bin")
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(head_of(spec, tmp_path), first)
    assert len(conversions) == 2


def test_files_of_other_versions_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, stranger = tiny_spec(), tmp_path / "notes"
    stranger.mkdir()
    monkeypatch.setattr(openvino_cache, "_recipe", lambda: "0" * 16)
    head_of(spec, tmp_path)
    monkeypatch.undo()
    head_of(spec, tmp_path)
    (kept,) = (path for path in tmp_path.iterdir() if path != stranger)
    assert not kept.name.startswith("0" * 16)
    assert stranger.exists()


def test_without_a_folder_nothing_is_left() -> None:
    segments = OpenVinoSegments(tiny_spec(), threads=1)
    folder = segments._folder
    assert folder.exists()
    del segments
    assert not folder.exists()


@pytest.mark.parametrize("problem", ["not a folder", "full disk"])
def test_a_folder_that_cannot_be_written_to_is_replaced(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, folder = tiny_spec(), tmp_path / "folder"
    expected = head_of(spec, tmp_path)
    if problem == "not a folder":
        folder.touch()
    save = openvino_cache.ov.save_model

    def save_elsewhere(graph: object, path: Path, **options: bool) -> None:
        if folder in path.parents:
            raise RuntimeError("basic_ios::clear: iostream error")
        save(graph, path, **options)

    monkeypatch.setattr(openvino_cache.ov, "save_model", save_elsewhere)
    assert torch.equal(head_of(spec, folder), expected)
    assert folder.is_file() or not any(folder.iterdir())


def test_a_full_disk_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: bool) -> None:
        raise RuntimeError("basic_ios::clear: iostream error")

    monkeypatch.setattr(openvino_cache.ov, "save_model", fail)
    with pytest.raises(OSError, match="disk may be full"):
        OpenVinoSegments(tiny_spec(), threads=1, folder=tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="memory maps are read from /proc")
def test_weights_are_not_held_twice(tmp_path: Path) -> None:
    spec = tiny_spec()
    segments = OpenVinoSegments(spec, threads=1, folder=tmp_path)
    maps = Path("/proc/self/smaps").read_text().split("VmFlags")
    resident = [
        int(line.split()[1]) for part in maps if str(tmp_path) in part for line in part.splitlines() if "Rss:" in line
    ]
    assert resident and not sum(resident)
    x = torch.ones(3, spec.hidden_size)
    exact = x @ spec.head.weight.T
    assert torch.allclose(segments.logits(x), exact, atol=1e-4)


def test_openvino_is_imported_without_its_telemetry() -> None:
    code = (
        "import sys; from importlib.util import module_from_spec, spec_from_file_location as at\n"
        "spec = at('runtime', 'utils/engine/openvino_graph.py'); module = module_from_spec(spec)\n"
        "spec.loader.exec_module(module); assert module.ov.Core\n"
        "assert not [name for name in sys.modules if name.startswith('openvino_telemetry')]\n"
        "import openvino_telemetry"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("limit", "refused"),
    [
        ("AVX2", {"int8", "int4", "gguf", "bfloat16"}),
        ("avx2_vnni", {"bfloat16"}),
        ("AVX512_CORE", set()),
        ("DEFAULT", set()),
    ],
)
@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_formats_whose_instructions_are_turned_off_are_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, limit: str, refused: set[str]
) -> None:
    monkeypatch.setattr(openvino_support, "cpu_features", lambda: ["avx512_bf16", "avx512_vnni"])
    monkeypatch.setenv(variable, limit)
    assert {name for name in ("float32", "int8", "int4", "gguf", "bfloat16") if unsupported(name)} == refused


def test_formats_need_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_support, "cpu_features", lambda: ["avx2", "fma"])
    assert unsupported("float32") is None
    assert unsupported("int8") == "int8 weights need a processor with avx512_vnni or avx_vnni"
    monkeypatch.setattr(openvino_support, "cpu_features", lambda: ["avx2", "avx_vnni"])
    assert [not unsupported(name) for name in ("int8", "int4", "gguf", "bfloat16")] == [True, True, True, False]
    monkeypatch.setattr(openvino_support, "find_spec", lambda name: None)
    assert unsupported("float32") == "the package openvino is not installed"
