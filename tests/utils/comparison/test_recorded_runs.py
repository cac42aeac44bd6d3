"""Records read back: all settings are restored, and damaged lines are skipped and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import screen
from recordings import Row, recorded

from utils.comparison.records import read_records
from utils.config.settings import Settings, as_json, from_json, setting_fields
from utils.config.value_types import Limits, ProcessorSpec, StorageSpec
from utils.metrics.costs import Costs


def test_all_settings_are_restored_from_a_record() -> None:
    other = Settings(
        speculative=False,
        drafter=True,
        beams=4,
        gamma=0,
        drafter_kind=("suffix", "layers:2"),
        costs=Costs((0.1, 0.25), (("head", 1.5),)),
        length=7,
        processor=ProcessorSpec(0.123456789, 7, 0.9),
        seed=0,
        verify="block",
        engine="plain",
        threads=1,
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
        request='{"tools": [{"name": "é\\n"}]}',
    )
    empty = Settings(system="", processor=ProcessorSpec(0.5, is_greedy=True), gamma=None, drafter_kind=("chain",))
    # A record holds whether chat was on, not that it was `auto`.
    for settings in (other, replace(empty, chat=True), Settings(chat=True)):
        assert from_json(json.loads(json.dumps(as_json(settings))), Limits()) == (settings, [])
    same = [entry.name for entry in setting_fields().values() if getattr(other, entry.name) == entry.default]
    assert same == ["ngram", "target"], "a new setting needs a value above that is not its default"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A record as a line with its newline."""
    folder = tmp_path_factory.mktemp("records")
    file = recorded(screen(), folder, "/length 3", "/ngram off", "/speculative off", "Hello")
    return file.read_text(encoding="utf-8")


def damaged(**changes: Any) -> Callable[[Row], str]:
    """A record as a line, with some fields changed, or removed if the new value is an ellipsis."""

    def line(row: Row) -> str:
        return json.dumps({name: value for name, value in (row | changes).items() if value is not ...})

    return line


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (lambda row: json.dumps(row)[:-9], "JSON"),
        (lambda row: "[" * 100_000, "JSON"),
        (lambda row: '{"prompt": "Hello"}', "record"),
        (lambda row: "[1]", "record"),
        (damaged(schema=1), "schema 1"),
        (damaged(record="race", schema=...), "schema none"),
        (damaged(prompt=...), '"prompt" is missing'),
        (damaged(prompt=3), '"prompt"'),
        (damaged(token_ids=[1, "2"]), '"token_ids"'),
        (damaged(token_ids=[True]), '"token_ids"'),
        (damaged(settings=[]), '"settings"'),
        (damaged(drafted=1.5), '"drafted"'),
        (damaged(tokens_per_second=float("nan")), '"tokens_per_second"'),
        (damaged(tokens_per_second=1e308), '"tokens_per_second"'),
        (damaged(tokens_per_second=10**400), '"tokens_per_second"'),
        (damaged(versions="1"), '"versions"'),
        (damaged(history="x"), '"history"'),
        (damaged(history=[{"role": "user"}, {"role": "assistant", "content": 3}]), '"history"'),
    ],
)
def test_a_damaged_line_is_skipped_and_named(line: Callable[[Row], str], name: str, good: str, tmp_path: Path) -> None:
    file = tmp_path / "damaged.jsonl"
    file.write_text(good + line(json.loads(good)) + "\n" + good, encoding="utf-8")
    found = read_records(file)
    assert len(found.runs) == 2 and len(found.left_out) == 1
    assert name in found.left_out[0] and "line 2" in found.left_out[0]
