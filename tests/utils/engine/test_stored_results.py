"""Results of the self-test from one start to the next: what is used, rechecked and kept."""

import json
from unittest import mock

import pytest
from fixed_speeds import only_engines, prefer
from stored_starts import start
from tiny import tiny_mamba

from utils.engine import Engine, engine, selftest
from utils.engine.module_swap import EngineLinear
from utils.engine.stored_results import MAX_ENTRIES, EntryFile, ResultFile


@pytest.fixture(autouse=True)
def _invariant_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    only_engines(monkeypatch, "plain", "invariant")  # calls of the self-test are counted
    prefer("invariant")


@pytest.mark.parametrize("int8", [False, True])
def test_the_second_start_rechecks_one_width_and_uses_the_stored_costs(
    file: ResultFile, tests: mock.Mock, int8: bool
) -> None:
    first = start(file, int8=int8)
    assert tests.call_count == 1 and first.state.verified and not first.state.tested_on
    first.draft_seconds["head"] = 0.25
    first.store()
    with (
        mock.patch.object(engine, "verify_costs") as measured,
        mock.patch.object(selftest, "one_width_differs", return_value="") as rechecked,
    ):
        second = start(file, int8=int8)
    assert tests.call_count == 1 and not measured.called and rechecked.call_count == 1
    assert second.state.verified and second.state.tested_on in second.state.sentence()
    assert (second.step_seconds, second.costs) == (first.step_seconds, first.costs)
    assert (second.state.threads, second.state.weights) == (first.state.threads, first.state.weights)
    assert second.draft_seconds == {"head": 0.25}


def test_the_whole_test_can_be_asked_for(file: ResultFile, tests: mock.Mock) -> None:
    start(file)
    second = start(file)
    assert second.state.tested_on and tests.call_count == 1
    layer = second._target.lm_head
    state = second.test("auto", 1)
    assert tests.call_count == 2 and state.verified and not state.tested_on
    assert isinstance(second._target.lm_head, EngineLinear) and second._target.lm_head is not layer
    rounded = start(file, int8=True)
    count = tests.call_count
    assert rounded.test("auto", 1).verified and tests.call_count == count + 1


def test_a_test_that_is_asked_for_is_made_even_if_the_file_cannot_be_written(
    file: ResultFile, tests: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(file)
    second = start(file)
    monkeypatch.setattr(EntryFile, "_write", lambda self, entries: False)
    assert not second.test("auto", 1).tested_on and tests.call_count == 2


def test_costs_of_models_that_stay_plain_are_stored_too(file: ResultFile) -> None:
    def plain() -> Engine:
        started = Engine([tiny_mamba(vocab_size=96)])
        started.results = file
        started.use("auto", 1)
        return started

    first = plain()
    with mock.patch.object(engine, "verify_costs") as measured:
        second = plain()
    assert not measured.called and second.costs == first.costs
    assert second.state == first.state and not second.state.verified and second.state.reason


def test_only_the_newest_results_are_kept(file: ResultFile) -> None:
    result = file.get("nothing")
    assert result is None
    start(file)
    (key,) = json.loads(file.path.read_text())["entries"]
    result = file.get(key)
    assert result is not None
    for number in range(MAX_ENTRIES):
        file.put(str(number), result)
    assert file.get(key) is None and file.get("0") == file.get(str(MAX_ENTRIES - 1)) == result
    file.drop("0")
    assert file.get("0") is None and file.get("1") == result
