"""Records read back: settings as they were, and damaged lines refused before anything is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, workbench
from test_replay import recorded

from utils.config.settings import Settings, as_json, restored
from utils.config.value_types import Limits, StorageSpec
from utils.logits_processor import GreedyProcessor, TopKNucleusProcessor
from utils.metrics.costs import Costs
from utils.repl.runner import Verdict

Row = dict[str, Any]


def test_all_settings_come_back_from_a_record() -> None:
    other = Settings(
        speculative=False,
        drafter=True,
        beams=4,
        gamma=0,
        drafter_kind=("suffix", "layers:2"),
        costs=Costs((0.1, 0.25), (("head", 1.5),)),
        length=7,
        processor=TopKNucleusProcessor(0.123456789, 7, 0.9),
        seed=0,
        verify="block",
        engine="plain",
        threads=3,
        cache=False,
        chat=False,
        system="on\ntwo lines ",
        special=True,
        ngram_storage=StorageSpec("onelevel", 5),
        ngram_limit=10,
        top_k_filler=1,
        reset_in_between=False,
        debug="full",
        turns=True,
    )
    empty = Settings(system="", processor=GreedyProcessor(0.5), gamma=None, drafter_kind=("chain",))
    for settings in (other, empty, Settings()):
        assert restored(json.loads(json.dumps(as_json(settings))), Limits()) == (settings, [])
    same = [entry.name for entry in fields(Settings) if getattr(other, entry.name) == entry.default]
    assert same == ["ngram", "target"]


def damaged(**changes: Any) -> Callable[[Row], str]:
    def line(row: Row) -> str:
        return json.dumps({name: value for name, value in (row | changes).items() if value is not ...})

    return line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (lambda row: json.dumps(row)[:-9], "line 2: this is no JSON"),
        (lambda row: "[" * 100_000, "line 2: this is no JSON"),
        (lambda row: '{"prompt": "Hello"}', "line 2: this is no record"),
        (lambda row: "[1]", "line 2: this is no record"),
        (damaged(schema=2), "line 2: its schema is 2, and schema 1 is the only one"),
        (damaged(record="race", schema=...), "line 2: its schema is none"),
        (damaged(prompt=...), 'its "prompt" is missing'),
        (damaged(prompt=3), 'its "prompt" is not what it should be'),
        (damaged(token_ids=[1, "2"]), 'its "token_ids" is not'),
        (damaged(token_ids=[True]), 'its "token_ids" is not'),
        (damaged(settings=[]), 'its "settings" is not'),
        (damaged(drafted=1.5), 'its "drafted" is not'),
        (damaged(tokens_per_second=float("nan")), 'its "tokens_per_second" is not'),
        (damaged(tokens_per_second=10**400), 'its "tokens_per_second" is not'),
        (damaged(versions="1"), 'its "versions" is not'),
        (damaged(history="x"), 'its "history" is not'),
        (damaged(history=[{"role": "user", "content": "x"}]), 'its "history" is not'),
        (damaged(history=[{"role": "user"}, {"role": "assistant", "content": 3}]), 'its "history" is not'),
    ],
)
def test_a_damaged_line_is_refused_before_anything_is_run(
    line: Callable[[Row], str], words: str, view: Screen, tmp_path: Path
) -> None:
    file = recorded(view, tmp_path, "/length 3", "/ngram off", "/speculative off", "Hello")
    good = file.read_text(encoding="utf-8")
    file.write_text(good + line(json.loads(good)) + "\n" + good, encoding="utf-8")
    bench = workbench(view)
    view.take()
    assert bench.handle(f"/replay {file}") is Verdict.FAILED
    results, messages = view.take()
    assert results == "" and words in messages and "line 2" in messages and messages.count("\n") == 1
