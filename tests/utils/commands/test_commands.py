"""Commands: their values and defaults, and bad input, which gets one sentence that names what is allowed."""

import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, open_session, table_pair
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT

from utils.commands import CommandContext, default_registry
from utils.commands.setting_commands import NO_EFFECT
from utils.commands.shared.registry import ChangeSettings
from utils.comparison.harness import Harness
from utils.config.settings import Settings, as_json
from utils.config.value_types import GREEDY, Limits, ProcessorSpec, StorageSpec
from utils.errors import UserError
from utils.repl.repl_session import ReplSession, Verdict

PAIR = table_pair()


@pytest.fixture(scope="module")
def pair():
    return PAIR


@pytest.fixture
def session(pair, view: Screen) -> ReplSession:
    return open_session(view, pair)


def test_default_settings() -> None:
    assert as_json(Settings()) == {
        "speculative": True,
        "ngram": True,
        "target": True,
        "drafter": False,
        "beams": 0,
        "gamma": "auto",
        "drafter_kind": "chain",
        "costs": "measure",
        "length": 128,
        "processor": "greedy",
        "seed": 42,
        "verify": "rejection",
        "engine": "auto",
        "threads": 0,
        "cache": True,
        "chat": True,
        "system": "default",
        "request": "none",
        "turns": False,
        "special": False,
        "ngram_storage": "basic 3",
        "ngram_limit": 1_000_000,
        "top_k_filler": 3,
        "reset_in_between": True,
        "debug": "off",
    }


def test_a_setting_is_changed_in_few_files(session: ReplSession) -> None:
    entered = set[Path]()

    def note(frame: Any, event: str, argument: Any) -> None:
        entered.add(Path(frame.f_code.co_filename))

    sys.setprofile(note)
    session.handle("/gamma 3")
    sys.setprofile(None)
    sources = [ROOT / top for top in ("utils", "sampling", "ngram_assisted")]
    ours = [path for path in entered if any(map(path.is_relative_to, sources))]
    assert len(ours) <= 12, sorted(ours)


@pytest.mark.parametrize("name", ["speculative", "ngram", "target", "drafter", "cache", "reset_in_between"])
def test_toggles_switch_and_accept_on_and_off(name: str, session: ReplSession) -> None:
    before = getattr(session.settings, name)
    assert session.handle(f"/{name}") is Verdict.DONE
    assert getattr(session.settings, name) is not before
    for word in ("on", "off", "ON", "no", "yes", "False", "TRUE", "0", "1"):
        session.handle(f"/{name} {word}")
        assert getattr(session.settings, name) is (word.lower() in ("on", "yes", "true", "1"))


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("/gamma 0", "gamma", 0),
        ("/gamma 63", "gamma", 63),
        ("/length 256", "length", 256),
        ("/seed 4294967295", "seed", 4294967295),
        ("/beams 16", "beams", 16),
        ("/verify Coupled", "verify", "coupled"),
        ("/top_k_filler 64", "top_k_filler", 64),
        ("/set_ngramstorage onelevel 5", "ngram_storage", StorageSpec("onelevel", 5)),
        ("/set_ngramstorage BASIC 16", "ngram_storage", StorageSpec("basic", 16)),
        ("/processor greedy", "processor", GREEDY),
        ("/processor greedy 0.5", "processor", ProcessorSpec(0.5, is_greedy=True)),
        ("/processor topk 0.8 300", "processor", ProcessorSpec(0.8, 300)),
        ("/processor nucleus 0 1", "processor", ProcessorSpec(0, top_p=1)),
        ("/processor topknucleus 1e1 5 .5", "processor", ProcessorSpec(10, 5, 0.5)),
        ("/system You are  brief.", "system", "You are  brief."),
        ("/system none", "system", ""),
        ("/system default", "system", None),
        ("  /gamma   7  ", "gamma", 7),
        ("/GAMMA 7", "gamma", 7),
        ("/gamma=7", "gamma", 7),
        ("/Gamma = 7", "gamma", 7),
        ("/gamma AUTO", "gamma", None),
        ("/system = brief =", "system", "brief ="),
        ("/system=brief", "system", "brief"),
        ("/debug yes", "debug", "on"),
        ("/debug FULL", "debug", "full"),
        ("/ngram candidates 64", "top_k_filler", 64),
        ("/ngram limit=9", "ngram_limit", 9),
        ("/ngram kind onelevel", "ngram_storage", StorageSpec("onelevel", 3)),
        ("/ngram kind onelevel 5", "ngram_storage", StorageSpec("onelevel", 5)),
        ("/ngram ORDER 16", "ngram_storage", StorageSpec("basic", 16)),
        ("/ngram keep on", "reset_in_between", False),
        ("/ngram off", "ngram", False),
        ("/gamma\t7", "gamma", 7),
    ],
)
def test_good_values_are_set(line: str, field: str, value: object, session: ReplSession) -> None:
    assert session.handle(line) is Verdict.DONE
    assert getattr(session.settings, field) == value


# Each message names the bad value, the allowed range or the nearest valid name.
BAD_LINES = [
    ("/gamma abc", ("abc", "0 to 63", "auto")),
    ("/gamma 64", ("64", "0 to 63", "auto")),
    ("/threads 100000", ("100000", "1 to", "auto")),
    ("/ngram ordr 3", ("ordr", "order?")),
    ("/ngram order 1", ("/ngram: order", "2 to 16")),
    ("/ngram kind tree", ("tree", "onelevel")),
    ("/ngram on 3", ("/ngram", "3")),
    ("/temperature -1", ("-1", "0 to 100")),
    ("/top_p 0", ("0", "at most 1")),
    ("/top_k 301", ("301", "0 to 300")),
    ("/temp 1", ("/temp", "/temperature")),
    ("/gamma -1", ("-1", "0 to 63")),
    ("/gamma 3.5", ("3.5", "0 to 63")),
    ("/gamma 1_0", ("1_0", "0 to 63")),
    ("/gamma ٣", ("٣", "0 to 63")),
    ("/gamma 4 5", ("4 5", "0 to 63")),
    ("/length 0", ("1 to 256",)),
    ("/length 257", ("257", "1 to 256")),
    ("/seed -1", ("-1", "0 to 4294967295")),
    ("/seed 4294967296", ("4294967296", "0 to 4294967295")),
    ("/beams 17", ("17", "0 to 16")),
    ("/top_k_filler 0", ("1 to 64",)),
    ("/debug maybe", ("maybe", "on, off, full")),
    ("/verify blok", ("blok", "rejection, coupled, block")),
    ("/speculative 2", ("2", "on", "off")),
    ("/processor nuclues 0.8 0.9", ("nuclues", "nucleus?")),
    ("/processor nucleus", ("T 0 to 100", "P above 0, at most 1")),
    ("/processor nucleus 0.8", ("/processor nucleus 0.8 0.95",)),
    ("/processor nucleus 0.8 0", ("top-p 0", "above 0")),
    ("/processor nucleus 0.8 1.5", ("top-p 1.5", "at most 1")),
    ("/processor nucleus nan 0.5", ("nan", "0 to 100")),
    ("/processor multinomial inf", ("inf", "0 to 100")),
    ("/processor multinomial 101", ("temperature 101", "0 to 100")),
    ("/processor multinomial -1", ("temperature -1", "0 to 100")),
    ("/processor topk 1 0", ("1 to 300",)),
    ("/processor topk 1 301", ("301", "1 to 300")),
    ("/processor topk 1 2.5", ("2.5", "1 to 300")),
    ("/processor greedy 1 2", ("greedy", "[T]")),
    ("/set_ngramstorage tree 3", ("tree", "basic, onelevel")),
    ("/set_ngramstorage onelvel 3", ("onelvel", "onelevel?")),
    ("/set_ngramstorage basic 1", ("1", "2 to 16")),
    ("/set_ngramstorage basic x", ("x", "2 to 16")),
    ("/help gama", ("/gama", "/gamma")),
    ("/gama 3", ("/gama", "/gamma")),
    ("/xyzzy", ("/xyzzy", "/help")),
    ("/", ("/help",)),
    ("/ gamma 3", ("/help",)),
    ("/quit now", ("/quit", "now")),
    ("/show gamma", ("/show", "gamma")),
]


@pytest.mark.parametrize(("line", "parts"), BAD_LINES)
def test_a_bad_line_gets_one_sentence_and_changes_nothing(
    line: str, parts: tuple[str, ...], session: ReplSession, view: Screen
) -> None:
    before = session.settings
    assert session.handle(line) is Verdict.FAILED
    results, messages = view.take()
    assert session.settings is before
    assert results == "" and all(part in messages for part in parts), messages
    assert messages.count("\n") == 1
    assert "Traceback" not in messages


@pytest.mark.parametrize("line", ["/processor", "/gamma", "/system ", "/seed", "/ngram kind", "/length", "/beams"])
def test_a_command_without_a_value_shows_the_current_one(line: str, session: ReplSession, view: Screen) -> None:
    if line.startswith("/system"):
        line = "/system"
    assert session.handle(line) is Verdict.DONE
    assert line.strip().removeprefix("/") in view.take()[1]


def test_a_bare_switch_says_what_it_was(session: ReplSession, view: Screen) -> None:
    for line, reply in (
        ("/cache", "cache: off (was on)"),
        ("/ngram", "ngram: off (was on)"),
        ("/ngram keep", "ngram keep: on (was off)"),
        ("/debug", "debug: on (was off)"),
        ("/turns", "turns: on (was off)"),
        ("/turns off", "turns: off"),
    ):
        assert session.handle(line) is Verdict.DONE
        assert view.take()[1].strip() == reply
    assert [part for part in session.status().split(" | ") if part.endswith((" on", " off"))] == [
        *("ngram off", "cache off", "debug on", "ngram keep on")
    ]


def test_show_has_the_models_and_settings(session: ReplSession, view: Screen) -> None:
    session.handle("/show")
    text = view.take()[0]
    assert all(
        part in text for part in ("tiny-target", "tiny-drafter (model)", "cpu", "float32, ", "greedy", "256 tokens")
    )


def test_chat_stays_off_without_a_template(view: Screen) -> None:
    session = open_session(view, table_pair(chat=False))
    for line in ("/chat on", "/chat auto", "/chat on"):
        assert not session.settings.uses_chat and not as_json(session.settings)["chat"]
        assert "no chat template" in view.take()[1]
        session.handle(line)


def test_a_setting_without_effect_is_reported(session: ReplSession, view: Screen) -> None:
    session.handle("/system Be brief.")
    assert NO_EFFECT not in view.take()[1]
    session.handle("/chat off")
    session.handle("/system Be brief.")
    assert NO_EFFECT in view.take()[1]


def test_quit_and_clear(session: ReplSession) -> None:
    assert session.handle("/quit") is Verdict.QUIT
    assert session.handle("/clear") is Verdict.DONE


@pytest.mark.parametrize("line", ["", "   ", "\t"])
def test_blank_lines_do_nothing(line: str, session: ReplSession, view: Screen) -> None:
    assert session.handle(line) is Verdict.DONE
    assert view.take() == ("", "")


WRITES = ("save", "export")


@given(
    text=st.text(max_size=25),
    name=st.sampled_from([command.name for command in default_registry() if command.name not in WRITES] + [""]),
)
def test_random_arguments_give_valid_settings_or_an_error(text: str, name: str) -> None:
    """Every command except those that would write files with these names."""
    registry, limits, harness = default_registry(), Limits(256, 300), Harness.of(PAIR, Settings())
    try:
        outcome = registry.run(f"/{name} {text}", CommandContext(Settings(), registry, harness, limits))
    except UserError as error:
        assert str(error)
        return
    for changed in (effect.settings for effect in outcome if isinstance(effect, ChangeSettings)):
        assert changed.gamma is None or 0 <= changed.gamma <= 63
        assert changed.drafter_kind
        assert 1 <= changed.length <= 256
        assert 1 <= changed.top_k_filler <= 64
        assert 0 <= changed.beams <= 16
