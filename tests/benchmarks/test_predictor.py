"""The errors that /whatif on= prints are recomputed from published figures, and its constants are fitted again."""

import sys
from dataclasses import replace

import pytest
from paths import BENCHMARKS

sys.path.append(str(BENCHMARKS))

import predictor
from predictor import MODELS, NEVER_FITTED, errors, fit, off, read_cells, scored, sound, table, weighted

from utils.commands.experiments.other_hardware import (
    BATCH,
    DEVICES,
    ERRORS,
    FITTED,
    MOST_CACHE,
    MOST_DRAFTS,
    Shape,
)

CELLS = read_cells()
USED, LEFT_OUT = sound(CELLS)


def test_the_errors_in_the_code_and_in_the_readme_are_those_of_the_published_cells() -> None:
    found = errors(USED)
    assert found == ERRORS
    readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert all(line in readme for line in table(found))


def test_the_constants_are_fitted_to_the_published_cells() -> None:
    for name, value in fit(USED)._asdict().items():
        assert getattr(FITTED, name) == pytest.approx(value, rel=4e-3), name
    assert fit([cell for cell in USED if cell.source != NEVER_FITTED]) == fit(USED)


def test_constants_do_not_depend_on_the_cells_that_they_are_scored_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spied(cells):  # type: ignore[no-untyped-def]
        seen.append({cell.held_out for cell in cells})
        return FITTED

    monkeypatch.setattr(predictor, "fit", spied)
    monkeypatch.setattr(predictor, "fit_pass", spied)
    list(scored(USED))
    groups = [*dict.fromkeys(cell.held_out for cell in USED if cell.k or cell.device)]
    assert len(seen) == len(groups) and all(group not in others for group, others in zip(groups, seen, strict=True))


def test_a_model_with_an_impossible_baseline_is_left_out_by_a_rule() -> None:
    assert {cell.model for cell in LEFT_OUT} == {"Llama-4-Scout"} and len(LEFT_OUT) == 42
    assert all(cell.ratio >= 1 for cell in USED if cell.k) and any(cell.ratio >= 1 for cell in LEFT_OUT)
    other = next(cell for cell in USED if cell.k)
    slower = [*USED, replace(other, plain=0.5 * other.speed / other.length)]
    assert {cell.model for cell in sound(slower)[1]} == {other.model}


def test_the_limits_of_predictions_are_those_of_the_cells() -> None:
    assert BATCH.high == max(cell.batch for cell in USED)
    assert max(cell.k for cell in USED) == MOST_DRAFTS
    loads = [cell.workload(FITTED) for cell in USED]
    assert max(load.cache / load.bytes_read() for load in loads) == pytest.approx(MOST_CACHE, abs=0.005)
    assert {cell.device for cell in USED} - {""} <= set(DEVICES)


def test_quantiles_give_every_series_the_same_weight() -> None:
    pairs = [("a", 0.1)] * 98 + [("b", 0.5), ("c", 0.9)]
    assert weighted(pairs, 0.5) == 0.5 and weighted(pairs, 0.9) == 0.9 and weighted(pairs, 0.3) == 0.1
    assert off(2, 1) == off(1, 2) == 1


def test_heads_are_about_as_large_as_published_ones() -> None:
    sizes = {"Llama-3.1-8B": 0.425, "Qwen3-1.7B": 0.14, "Qwen3-30B-A3B": 0.15, "Llama-3.1-70B": 0.9}
    for model, billions in sizes.items():
        assert MODELS[model].head == pytest.approx(billions * 1e9, rel=0.4), model
    assert isinstance(MODELS["Kimi-K2"], Shape)
