"""An ambiguous drafter is examined when it is loaded, read in the better way, and remembered."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from drafter_checkpoints import VOCABULARY, eagle3_tensors, layer_keys, speculators_config, write_checkpoint
from shelf import load
from tiny import save_folder, tiny_llama, tiny_tokenizer
from trained_drafter import PROMPT, RIGHT, trained

from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.eagle3 import is_ambiguous
from utils.engine.stored_results import ResultFile
from utils.pairs import doctor
from utils.pairs.doctor import INTERRUPTED, READINGS

pytestmark = pytest.mark.usefixtures("readings_compared_once")
WRONG = replace(RIGHT, feature_layers=(3, 5, 6))


@pytest.fixture
def pair(tmp_path, monkeypatch) -> Any:
    """With the trained drafter, declared wrongly."""
    target, text, drafter = trained()
    drafter.conventions = WRONG
    monkeypatch.setattr(drafter, "is_ambiguous", True)
    monkeypatch.setattr(doctor, "own_text", lambda *arguments: text)
    results = ResultFile(tmp_path / "cache" / "engine.json")
    engine = SimpleNamespace(results=results, report=lambda line: None, identity="the files")
    return SimpleNamespace(drafter=drafter, target=target, engine=engine)


def settle_reading(pair: Any) -> str:
    return doctor.settle_reading(pair, lambda: list(range(PROMPT)))


def examinations(monkeypatch, error: BaseException | None = None) -> list[int]:
    """Count examinations from now on, or let them fail."""
    seen: list[int] = []
    original = doctor.examine

    def counted(*arguments: Any, **options: Any) -> Any:
        seen.append(1)
        if error:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(doctor, "examine", counted)
    return seen


def test_a_wrong_reading_is_corrected_and_remembered(pair, monkeypatch):
    seen, drafter = examinations(monkeypatch), pair.drafter
    line = settle_reading(pair)
    assert drafter.conventions == RIGHT and "now read with layer ids read as inputs of layers" in line
    drafter.conventions = WRONG
    assert "earlier examination" in settle_reading(pair)
    assert drafter.conventions == RIGHT and len(seen) == 1


@pytest.mark.parametrize("changed", ["files", pytest.param("damaged", marks=pytest.mark.full)])
def test_what_was_remembered_holds_for_the_same_files_only(pair, monkeypatch, changed):
    settle_reading(pair)
    seen, stored = examinations(monkeypatch), pair.engine.results.path.with_name(READINGS)
    pair.drafter.conventions = WRONG
    if changed == "files":
        pair.engine.identity = "other files"
    else:
        stored.write_bytes(stored.read_bytes()[:-20])
    settle_reading(pair)
    assert len(seen) == 1 and pair.drafter.conventions == RIGHT


def test_ctrl_c_ends_the_examination_alone(pair, monkeypatch):
    examinations(monkeypatch, KeyboardInterrupt())
    assert settle_reading(pair) == INTERRUPTED
    assert pair.drafter.conventions == WRONG


def test_clear_files_are_examined_by_the_command_only(pair, monkeypatch):
    drafter = pair.drafter
    monkeypatch.setattr(drafter, "is_ambiguous", False)
    seen = examinations(monkeypatch)
    assert settle_reading(pair) == "" and not seen
    doctor.use(pair, RIGHT)  # as /pair doctor found it
    drafter.conventions = WRONG
    assert settle_reading(pair) and drafter.conventions == RIGHT and not seen


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, False),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}, False),
        ({"target_layer_ids": [1, 2, 3]}, False),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, True),
        ({"eagle_config": None}, False),
        ({"norm_output": True}, True),
        ({"norm_output": False}, True),
        ({"speculators_model_type": "eagle3", "norm_output": True}, True),
        ({"speculators_model_type": "eagle3", "norm_output": True, "norm_before_residual": False}, False),
    ],
)
def test_what_programs_read_differently_is_ambiguous(config, expected):
    assert is_ambiguous(DrafterCheckpoint("drafter", config, {})) is expected


def test_loading_says_whether_a_checkpoint_is_ambiguous(tmp_path):
    target = save_folder(tmp_path / "target", tiny_llama(num_hidden_layers=6), tiny_tokenizer(VOCABULARY))
    clear = write_checkpoint(tmp_path / "clear", speculators_config({}), eagle3_tensors({}))
    nested = layer_keys(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})
    unclear = write_checkpoint(tmp_path / "unclear", nested, eagle3_tensors({}))
    drafters = [load(target, drafter=str(folder)).drafter for folder in (clear, unclear)]
    assert [drafter.is_ambiguous for drafter in drafters] == [False, True]
    assert drafters[1].feature_layers == (2, 3, 4)
