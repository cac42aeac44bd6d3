"""Drafters that the package speculators saves give the logits that it computes. See tests/speculators_oracle.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from safetensors.torch import load_file
from speculators_oracle import EAGLE3, HIDDEN, PEAGLE, READ, SLIDING, VOCABULARY
from tiny import tiny_llama

from sampling.drafters.feature_sessions import FeatureSession, feature_session
from utils.drafter_formats.checkpoint import read_checkpoint
from utils.drafter_formats.formats import format_of
from utils.models.sources import locate

FIXTURES = Path(__file__).parent / "fixtures" / "speculators"
# Programs that wrote the fixtures, and packages that they need besides those of requirements.txt.
HELPERS = ["loguru", "pydantic-settings"]
PACKAGES = ["--no-deps", "speculators==0.9.0"]
PROGRAMS = {
    "speculators": ("speculators_oracle.py", PACKAGES),
    "speculators_blocks": ("speculators_block_oracle.py", PACKAGES),
}


def target_model() -> Any:
    return tiny_llama(vocab_size=VOCABULARY, hidden_size=HIDDEN, num_attention_heads=2, num_hidden_layers=6)


def session_of(folder: Path, target: Any, layers: tuple[int, ...]) -> FeatureSession:
    checkpoint = read_checkpoint(locate(str(folder), print))
    assert checkpoint is not None
    row = format_of(checkpoint)
    assert row is not None
    drafter = row.load(checkpoint, target)
    assert drafter.feature_layers == layers
    return feature_session(drafter)


def check_logits(folder: Path, growth: int) -> None:
    """Rounds that each bring features of `growth` more positions; what was made from drafts is dropped between."""
    run, stored = load_file(folder / "run.safetensors"), load_file(folder / "model.safetensors")
    chosen = stored["d2t"] + torch.arange(len(stored["d2t"]))
    context, known = [0, *run["tokens"].tolist()], 0
    session = session_of(folder, target_model(), tuple(READ))
    session.begin(context[:1])
    for last in range(growth - 1, run["logits"].shape[1], growth):
        end = last + 1
        session.rewind(end)
        session.add_features(run["features"][known:end], known, end)
        known = end
        # While the package trains EAGLE-3, a window stays where the first draft has it; programs that draft move it.
        first_only = folder.name in SLIDING and not folder.name.startswith("peagle")
        for step, rows in enumerate(run["logits"][: 1 if first_only else None]):
            logits = session.feed(context[: end + 1 + step], keep=1)[0]
            assert torch.allclose(logits[chosen], rows[last], atol=5e-5, rtol=1e-5), (last, step)
            assert int(torch.isneginf(logits).sum()) == VOCABULARY - len(chosen)


@pytest.mark.parametrize("growth", [1, 3])
@pytest.mark.parametrize("name", EAGLE3 | PEAGLE | SLIDING)
def test_logits_are_those_of_the_package(name, growth):
    check_logits(FIXTURES / name, growth)


@pytest.mark.full
@pytest.mark.parametrize("fixtures", PROGRAMS)
def test_the_package_computes_the_stored_logits(tmp_path: Path, fixtures: str) -> None:
    """In packages of its own, because speculators declares versions of transformers below the one used here."""
    packages, (name, needed) = tmp_path / "packages", PROGRAMS[fixtures]
    for words in (HELPERS, needed):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages), *words]
        installed = subprocess.run(command, capture_output=True, text=True, check=False)
        if installed.returncode:
            pytest.skip(f"{words} cannot be installed here: {installed.stderr.strip()[-200:]}")
    environment: dict[str, Any] = os.environ | {"PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)])}
    program = [sys.executable, str(ROOT / "tests" / name), str(tmp_path / "folders")]
    run = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    folder = FIXTURES.parent / fixtures
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in (tmp_path / "folders").iterdir()}
    for name in names:
        for file in ("model", "run"):
            stored, made = (load_file(root / name / f"{file}.safetensors") for root in (folder, tmp_path / "folders"))
            assert stored.keys() == made.keys()
            assert all(torch.allclose(stored[key].double(), made[key].double(), atol=1e-4) for key in stored), name
