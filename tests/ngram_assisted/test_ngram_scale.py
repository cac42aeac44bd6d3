"""N-gram storages at scale: bounded, in constant time per token, and unchanged by saving and loading."""

import os
import random
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from fakes import Screen, checked, open_session
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ngram_assisted import STORAGES, NGramStorage, OneLevelNGramStorage, load_storage, save_storage
from ngram_assisted.ngram_storage import ARRAYS, DAMAGED
from utils.errors import UserError
from utils.repl.repl_session import Verdict

TOKENS = st.integers(0, 6)


def contents_of(storage: NGramStorage) -> list[tuple[tuple[int, ...], list[tuple[int, int]]]]:
    """The contents of a storage, in order."""
    return [(context, list(counts.items())) for context, counts in storage.contexts()]


@given(n=st.integers(2, 5), ids=st.lists(TOKENS, max_size=60), limit=st.integers(1, 30))
@pytest.mark.parametrize("storage_class", [NGramStorage, OneLevelNGramStorage])
def test_the_limit_is_never_exceeded(storage_class: type[NGramStorage], n: int, ids: list[int], limit: int) -> None:
    free, bound = storage_class(n, 7), storage_class(n, 7, limit)
    for left, right in pairwise(ids):
        for storage in (free, bound):
            storage.update([left], [right])
        assert len(bound) == sum(len(counts) for _, counts in bound.contexts()) <= limit
    for storage in (free, bound):
        storage.initialize(ids)
    assert len(bound) <= limit
    grams = {(*context, token) for context, counts in bound.contexts() for token in counts}
    assert all(bound.has_gram(gram) for gram in grams) and all(free.has_gram(gram) for gram in grams)
    bound.limit = 1
    assert len(bound) <= 1
    bound.reset()
    assert len(bound) == 0 and contents_of(bound) == []


def test_the_oldest_contexts_are_forgotten_first() -> None:
    storage = NGramStorage(2, 100, limit=3)
    for context in (1, 2, 3, 4):
        storage.update([context], [context + 50])
    assert [context for context, _ in storage.contexts()] == [(2,), (3,), (4,)]
    assert storage.next_token([1]) is None and storage.next_token([4]) == 54
    storage.update([2], [9])  # entered again, but its context is the oldest
    assert storage.next_token([2]) is None


def test_a_context_with_more_tokens_than_the_limit_is_forgotten() -> None:
    storage = NGramStorage(2, 100, limit=2)
    storage.update([1], [5, 6, 7])
    assert len(storage) == 0 and storage.next_token([1]) is None


@pytest.mark.parametrize("limit", [0, -1, 10**9])
def test_limits_out_of_range_are_refused(limit: int) -> None:
    with pytest.raises(UserError, match=str(limit)):
        NGramStorage(2, 5, limit)


def executed_lines(work: Callable[[], object]) -> int:
    """The number of Python lines that are executed during a call."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous)
    return lines


def test_time_per_token_does_not_grow_with_the_storage() -> None:
    """Counted in lines, not timed: with a full storage new tokens are as cheap as with an empty one."""
    storage, source = NGramStorage(3, 1000, limit=4000), random.Random(1)
    lines = []
    for _ in range(5):
        ids = [source.randrange(1000) for _ in range(2000)]
        lines.append(executed_lines(lambda ids=ids: (storage.initialize(ids), storage.next_token([1, 2]))))
    assert len(storage) > 3900 and max(lines) < 2 * min(lines), lines


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(2, 5),
    ids=st.lists(TOKENS, max_size=50),
    limit=st.integers(5, 60),
    query=st.lists(TOKENS, min_size=1, max_size=5),
)
@pytest.mark.parametrize("kind", STORAGES)
def test_a_loaded_storage_equals_the_saved_one(
    tmp_path_factory, kind: str, n: int, ids: list, limit: int, query: list
) -> None:
    storage = STORAGES[kind](n, 7, limit)
    storage.initialize(ids)
    storage.update(ids[-3:] or [1], [2, 2, 3])
    path = tmp_path_factory.mktemp("ngrams") / "a.ngrams"
    save_storage(storage, path, "a model")
    loaded, loaded_kind, model = load_storage(path, 7, limit)
    assert (loaded_kind, model, type(loaded), loaded.n, len(loaded)) == (
        kind,
        "a model",
        type(storage),
        n,
        len(storage),
    )
    assert contents_of(loaded) == contents_of(storage)
    for one in (storage, loaded):  # and both change alike
        one.update(query, [1, 4])
        one.initialize(query)
    assert contents_of(loaded) == contents_of(storage)
    assert loaded.look_up(query) == storage.look_up(query)
    assert not list(path.parent.glob("*.part"))


def test_unsuitable_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ngrams"
    storage = NGramStorage(3, 50)
    storage.initialize([1, 2, 3, 1, 2, 4])
    save_storage(storage, path)
    good = load_file(path)
    about = {"format": "n-gram storage", "version": "1", "kind": "basic", "order": "3", "vocabulary": "50", "model": ""}

    def refused(arrays: dict, words: dict, match: str) -> None:
        save_file(arrays, path, metadata=words)
        with pytest.raises(UserError, match=match):
            load_storage(path, 50, 100)

    refused(good, about | {"version": "2"}, "version 2")
    refused(good, about | {"format": "weights"}, "/ngram save")
    refused(good, about | {"vocabulary": "60"}, "60 .*50")
    refused(good, about | {"kind": "tree"}, DAMAGED)
    refused(good, about | {"order": "two"}, DAMAGED)
    refused(good, about | {"order": "2"}, DAMAGED)
    refused(good | {"counts": -good["counts"]}, about, DAMAGED)
    refused(good | {"followers": good["followers"] + 50}, about, r"\b49\b")
    refused(good | {"followers": good["followers"][:-1]}, about, DAMAGED)
    refused({name: good[name] for name in ARRAYS[1:]}, about, DAMAGED)
    refused(good | {"sizes": np.append(good["sizes"], 1)}, about, DAMAGED)
    for name in ARRAYS:
        rest = {other: good[other] for other in ARRAYS if other != name}
        refused(rest | {name: np.append(good[name], 1)}, about, DAMAGED)  # more than is used
        refused(rest | {name: good[name][:-1]}, about, DAMAGED)
        if name != "counts":
            refused(rest | {name: np.append(good[name][:-1], 2**62)}, about, f"{DAMAGED}|outside")
        refused(rest | {name: good[name].astype(np.float64) * np.nan}, about, DAMAGED)
        for kind in (np.float64, np.uint64, bool):
            refused(rest | {name: good[name].astype(kind)}, about, DAMAGED)
        refused(rest | {name: good[name][None]}, about, DAMAGED)
    twice = {"sizes": [1], "contexts": [3], "branches": [2], "followers": [4, 4], "counts": [1, 2]}
    refused({name: np.array(values) for name, values in twice.items()}, about, DAMAGED)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ngrams"
    path.write_bytes(b"\x80\x04 a pickle, which must not be opened")
    with pytest.raises(UserError, match=DAMAGED):
        load_storage(path, 50, 100)
    with pytest.raises(UserError, match="none") as missing:
        load_storage(tmp_path / "none", 50, 100)
    assert str(missing.value).count("none") == 1, "the path is said once"
    os.mkfifo(tmp_path / "pipe")  # would be waited for without an end
    for odd in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(UserError, match="regular"):
            load_storage(odd, 50, 100)


@pytest.mark.parametrize("place", ["none/a.ngrams", "file/x", "x" * 256, "folder", "pipe", "link", "a\0b"])
def test_places_that_cannot_be_written(tmp_path: Path, place: str) -> None:
    storage = NGramStorage(3, 50)
    storage.initialize([1, 2, 3, 1, 2, 4])
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")  # a device is treated alike, and this one may be lost
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    for overwrite in (False, True):
        with pytest.raises(UserError, match="cannot be written|already exists"):
            save_storage(storage, tmp_path / place, overwrite=overwrite)
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "file").read_text() == "mine"


def test_an_existing_file_is_replaced_only_on_demand(tmp_path: Path) -> None:
    path, storage = tmp_path / "a.ngrams", NGramStorage(3, 50)
    storage.initialize([1, 2, 3])
    path.write_text("mine")
    with pytest.raises(UserError, match="overwrite"):
        save_storage(storage, path)
    assert path.read_text() == "mine"
    save_storage(storage, path, overwrite=True)
    assert contents_of(load_storage(path, 50, 100)[0]) == contents_of(storage)


def test_a_loaded_storage_takes_no_more_memory_than_the_one_that_was_saved(tmp_path: Path) -> None:
    storage = NGramStorage(4, 1000)
    storage.initialize(np.random.default_rng(0).integers(0, 1000, 3000).tolist())
    save_storage(storage, tmp_path / "a.ngrams")
    loaded = load_storage(tmp_path / "a.ngrams", 1000, 10**6)[0]

    def dicts(one: NGramStorage) -> int:
        return sum(isinstance(followers, dict) for level in one._levels.values() for followers in level.values())

    def objects(one: NGramStorage) -> int:
        return len({id(token) for context, counts in one.contexts() for token in (*context, *counts)})

    assert dicts(loaded) == dicts(storage) < len(storage) / 3 and objects(loaded) <= objects(storage)


def test_a_storage_can_be_used_in_a_later_session(view: Screen, tmp_path: Path) -> None:
    file, path = tmp_path / "runs.jsonl", tmp_path / "a.ngrams"
    first = open_session(view, records=file)
    for line in ("/target off", "/speculative off", "/length 30"):
        first.handle(line)
    cold = checked(first, file, "Hello there")
    assert first.handle(f"/ngram save {path}") is Verdict.DONE
    assert str(path) in view.take()[1]

    second = open_session(view, records=file)
    for line in ("/target off", "/speculative off", "/length 30"):
        second.handle(line)
    assert second.handle("/ngram save nowhere.ngrams") is Verdict.FAILED  # it is still empty
    assert second.handle(f"/ngram load {path}") is Verdict.DONE
    assert "/ngram keep" in view.take()[1]
    assert not second.settings.reset_in_between
    warm = checked(second, file, "Hello there")
    assert warm["token_ids"] == cold["token_ids"]
    assert warm["accepted"] > cold["accepted"]
    for line in (
        "/ngram load",
        f"/ngram load {tmp_path / 'none'}",
        "/ngram_limit 0",
        "/ngram_limit x",
        "/ngram save ~nobody-knows/x",
    ):
        assert second.handle(line) is Verdict.FAILED, line
    assert checked(second, file, "/ngram_limit 3", "Hello there")["settings"]["ngram_limit"] == 3
    assert len(second.harness.state.storage) <= 3
