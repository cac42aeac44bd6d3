"""/undo, /save, /run, and the toolbar."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import hypothesis
import pytest
from fakes import Screen, open_session, records_of, screen
from hypothesis import strategies as st

from utils.bounds import MAX_NGRAMS, RULES
from utils.config.settings import Settings
from utils.config.value_types import ProcessorSpec, StorageSpec
from utils.metrics.costs import Costs
from utils.repl.loaded_pair import NOTHING_TO_UNDO
from utils.repl.repl_session import MAX_NESTED_FILES, Verdict


def test_settings_are_saved_and_restored(view: Screen, tmp_path: Path) -> None:
    session, file = open_session(view), tmp_path / "evening.txt"
    for line in (
        "/gamma 7",
        "/processor nucleus 0.7 0.9",
        "/seed 5",
        "/drafter on",
        "/system be brief",
        f"/save {file}",
    ):
        assert session.handle(line) is Verdict.DONE, view.take()
    saved, chosen = file.read_text(), session.settings
    assert "/gamma 7\n" in saved and "/processor nucleus 0.7 0.9\n" in saved
    for line in ("/gamma 1", "/processor greedy", "/seed 9", "/drafter off", "/system default"):
        session.handle(line)
    assert session.settings != chosen
    assert session.handle(f"/run {file}") is Verdict.DONE and session.settings == chosen
    assert session.handle(f"/save {file}") is Verdict.FAILED and "overwrite" in view.take()[1]
    assert session.handle(f"/save {file} overwrite") is Verdict.DONE
    (tmp_path / "letter.txt").write_text("Dear all")
    view.take()
    for path in (tmp_path / "letter.txt", tmp_path / "no" / "x"):
        assert session.handle(f"/save {path}") is Verdict.FAILED and str(path) in view.take()[1]
    assert (tmp_path / "letter.txt").read_text() == "Dear all"


def test_files_of_commands_and_prompts_run_as_if_typed(view: Screen, tmp_path: Path) -> None:
    session = open_session(view, records=tmp_path / "records.jsonl")
    (tmp_path / "lines.txt").write_text("# a remark\n/length 3\n\nHello\n/nonsense\nHello again\n")
    assert session.handle(f"/run {tmp_path / 'lines.txt'}") is Verdict.FAILED, "one of its lines failed"
    assert [row["prompt"] for row in records_of(tmp_path / "records.jsonl")] == ["Hello"] * 3 + ["Hello again"] * 3
    (tmp_path / "quit.txt").write_text("/quit\n/length 9\n")
    assert session.handle(f"/run {tmp_path / 'quit.txt'}") is Verdict.QUIT and session.settings.length == 3
    (tmp_path / "self.txt").write_text(f"/run {tmp_path / 'self.txt'}\n")
    view.take()
    assert session.handle(f"/run {tmp_path / 'self.txt'}") is Verdict.FAILED
    assert f"{MAX_NESTED_FILES}" in view.take()[1].splitlines()[-1]
    assert session.handle(f"/run {tmp_path / 'lines.txt'}") is Verdict.FAILED
    for line, part in (
        ("/run", "/run evening.txt"),
        ("/run /nowhere", "/nowhere"),
        ("/run ~nosuchuser/x", "~nosuchuser/x"),
        ("/save a\0b", "/save"),
    ):
        view.take()
        assert session.handle(line) is Verdict.FAILED and part in view.take()[1]


def test_changes_are_undone_one_by_one(view: Screen) -> None:
    session = open_session(view)
    first = session.settings
    assert session.handle("/undo") is Verdict.FAILED and NOTHING_TO_UNDO in view.take()[1]
    session.handle("/gamma 9")
    session.handle("/length 12")
    session.handle("/length 12")
    session.handle("/length nonsense")
    view.take()
    assert (
        session.handle("/undo") is Verdict.DONE and view.take()[1].strip() == f"undone: length {first.length} (was 12)"
    )
    assert session.handle("/undo") is Verdict.DONE and session.settings == first
    assert session.handle("/undo") is Verdict.FAILED


def test_the_toolbar_shows_pair_settings_and_last_speeds(view: Screen) -> None:
    session = open_session(view)
    assert session.status() == "tiny-target + tiny-drafter | gamma 4 | processor greedy | verify rejection | plain"
    session.handle("/length 3")
    session.handle("Hello")
    assert "| tokens/s: speculative " in session.status() and ", target " in session.status()


SEPARATORS = ("\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\udcff")


@pytest.mark.parametrize("separator", SEPARATORS)
def test_the_text_of_a_setting_never_becomes_a_command(view: Screen, tmp_path: Path, separator: str) -> None:
    session, file = open_session(view), tmp_path / "file"
    for line in (f"/system hello{separator}/seed 7", f"/save {file}"):
        assert session.handle(line) is Verdict.DONE, view.take()
    chosen = session.settings
    assert chosen.system == f"hello{separator}/seed 7"
    for line in ("/system default", "/seed 1", f"/run {file}"):
        assert session.handle(line) is Verdict.DONE
    assert session.settings == chosen


@pytest.mark.parametrize(
    "text", ["  a ", " ", "= x", "#", "\\", "\\n", "C:\\x41", "\0", "\ufeff", "\U0010ffff", "/quit"]
)
def test_texts_that_look_like_something_else_are_restored(view: Screen, tmp_path: Path, text: str) -> None:
    session, file = open_session(view), tmp_path / "file"
    session._loaded.change(replace(session.settings, system=text))  # as from a config file
    for line in (f"/save {file}", "/system default", f"/run {file}"):
        assert session.handle(line) is Verdict.DONE
    assert session.settings.system == text


PROCESSORS = st.one_of(
    st.builds(ProcessorSpec, st.floats(0, 100), is_greedy=st.booleans()),
    st.builds(ProcessorSpec, st.floats(0, 100), st.integers(1, 300), st.none() | st.floats(1e-9, 1)),
)
SYSTEMS = st.none() | st.text(st.characters(codec=None) | st.sampled_from([*SEPARATORS, "\\", "n", " "]))
VERIFY, BY_KIND = st.lists(st.floats(0, 1100)), st.dictionaries(st.just("model"), st.floats(0, 1100))
LONGER_COSTS = st.builds(Costs.of, VERIFY, BY_KIND, length=st.integers(65, 10**6), step=st.floats(0, 1100))
ALL_SETTINGS = st.builds(
    Settings,
    **dict.fromkeys(("speculative", "ngram", "target", "drafter", "cache", "turns", "special"), st.booleans()),
    beams=st.integers(0, 16),
    gamma=st.none() | st.integers(0, 63),
    drafter_kind=st.sampled_from([("loaded",), ("lookup", "suffix"), ("chain",)]),
    costs=st.builds(Costs.of, VERIFY, BY_KIND, BY_KIND)
    | st.builds(Costs.of, VERIFY, BY_KIND, BY_KIND, length=st.integers(1, 64), longer=LONGER_COSTS),
    length=st.integers(1, 128),
    processor=PROCESSORS,
    seed=st.integers(0, 2**32 - 1),
    verify=st.sampled_from(RULES),
    engine=st.just("plain"),
    threads=st.just(0),
    system=SYSTEMS.filter(lambda text: text not in ("none", "default")),
    ngram_storage=st.builds(StorageSpec, st.sampled_from(["basic", "onelevel"]), st.integers(2, 16)),
    ngram_limit=st.integers(1, MAX_NGRAMS),
    top_k_filler=st.integers(1, 64),
    reset_in_between=st.booleans(),
    debug=st.sampled_from(["off", "on", "full"]),
)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.full)])
def test_any_settings_are_restored(tmp_path: Path, count: int) -> None:
    session, file = open_session(screen()), tmp_path / "file"
    # The conditions of a session in which nothing is measured.
    loaded = session._loaded

    @hypothesis.settings(max_examples=count, deadline=None)
    @hypothesis.given(ALL_SETTINGS, ALL_SETTINGS)
    def restore(chosen: Settings, other: Settings) -> None:
        loaded.change(chosen)
        chosen = loaded.settings
        assert session.handle(f"/save {file} overwrite") is Verdict.DONE
        loaded.change(other)
        assert session.handle(f"/run {file}") is Verdict.DONE
        assert loaded.settings == chosen

    restore()


def test_a_settings_file_is_one_change_and_one_line(view: Screen, tmp_path: Path) -> None:
    session, file = open_session(view), tmp_path / "file"
    session.handle("/gamma 7")
    session.handle(f"/save {file}")
    session.handle("/gamma 3")
    session.handle("/seed 3")
    before = session.settings
    view.take()
    assert session.handle(f"/run {file}") is Verdict.DONE
    shown = "".join(view.take())
    assert len(shown.splitlines()) == 1 and "gamma 7" in shown and "seed 42" in shown and "beams" not in shown
    assert session.handle("/undo") is Verdict.DONE and session.settings == before
    file.write_text(re.sub("/length .*", "/length 999999", file.read_text()) + "/ngram candidates 9\nHello\n")
    assert session.handle(f"/run {file}") is Verdict.FAILED, "the target does not support this length"
    assert "999999" in view.take()[1] and session.settings == before, "nothing is changed"
    file.write_text(re.sub("/length .*", "/length 9", file.read_text()))
    assert session.handle(f"/run {file}") is Verdict.DONE
    assert session.settings.gamma == 7 and session.settings.top_k_filler == 9 and session.harness.last().text == "Hello"


def test_only_newlines_separate_lines(view: Screen, tmp_path: Path) -> None:
    session, file = open_session(view, records=tmp_path / "records.jsonl"), tmp_path / "file"
    session.handle("/length 1")
    file.write_bytes("one\u2028/seed 7\r\n".encode() + b"two\x0c/seed 8\nthree\r/seed 9\n")
    assert session.handle(f"/run {file}") is Verdict.DONE
    prompts = dict.fromkeys(row["prompt"] for row in records_of(tmp_path / "records.jsonl"))
    assert list(prompts) == ["one\u2028/seed 7", "two\x0c/seed 8", "three\r/seed 9"] and session.settings.seed == 42
