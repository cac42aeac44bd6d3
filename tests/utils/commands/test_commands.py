"""Every command: its value, its default, its bad inputs, each answered in one sentence that names what is allowed."""

import pytest
from fakes import Screen, tiny_pair, workbench
from hypothesis import given, settings
from hypothesis import strategies as st

import infer
from utils.commands import default_registry
from utils.comparison.harness import Bench
from utils.config.settings import Settings, as_json
from utils.config.value_types import Limits, ProcessorKind, StorageSpec
from utils.logits_processor import GreedyProcessor, NucleusProcessor, TopKNucleusProcessor, TopKProcessor
from utils.repl.repl_session import Workbench
from utils.repl.runner import Verdict

PAIR = tiny_pair()


@pytest.fixture(scope="module")
def pair():
    return PAIR


@pytest.fixture
def bench(pair, view: Screen) -> Workbench:
    return workbench(view, pair)


def test_defaults_are_those_of_the_manual() -> None:
    assert as_json(Settings()) == {
        "speculative": True,
        "ngram": True,
        "target": True,
        "drafter": False,
        "beams": 0,
        "gamma": "auto",
        "drafter_kind": "loaded",
        "costs": "measure",
        "length": 35,
        "processor": "greedy",
        "seed": 42,
        "verify": "rejection",
        "engine": "auto",
        "threads": 0,
        "cache": True,
        "chat": True,
        "system": "default",
        "turns": False,
        "special": False,
        "ngram_storage": "basic 3",
        "ngram_limit": 1_000_000,
        "top_k_filler": 3,
        "reset_in_between": True,
        "debug": "off",
    }


@pytest.mark.parametrize("name", ["speculative", "ngram", "target", "drafter", "cache", "chat", "reset_in_between"])
def test_toggles_flip_and_take_on_and_off(name: str, bench: Workbench) -> None:
    before = getattr(bench.settings, name)
    assert bench.handle(f"/{name}") is Verdict.DONE
    assert getattr(bench.settings, name) is not before
    for word in ("on", "off", "ON"):
        bench.handle(f"/{name} {word}")
        assert getattr(bench.settings, name) is (word.lower() == "on")


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
        ("/processor greedy", "processor", GreedyProcessor()),
        ("/processor greedy 0.5", "processor", GreedyProcessor(0.5)),
        ("/processor topk 0.8 300", "processor", TopKProcessor(0.8, 300)),
        ("/processor nucleus 0 1", "processor", NucleusProcessor(0, 1)),
        ("/processor topknucleus 1e1 5 .5", "processor", TopKNucleusProcessor(10, 5, 0.5)),
        ("/system You are  brief.", "system", "You are  brief."),
        ("/system none", "system", ""),
        ("/system default", "system", None),
        ("  /gamma   7  ", "gamma", 7),
        ("/gamma\t7", "gamma", 7),
    ],
)
def test_good_values_are_taken(line: str, field: str, value: object, bench: Workbench) -> None:
    assert bench.handle(line) is Verdict.DONE
    assert getattr(bench.settings, field) == value


BAD = [
    ("/gamma abc", "'abc' is not a whole number; allowed: 0 to 63."),
    ("/gamma 64", "64 is out of range: 0 to 63; the nearest is 63."),
    ("/gamma -1", "the nearest is 0."),
    ("/gamma 3.5", "not a whole number"),
    ("/gamma 1_0", "not a whole number"),
    ("/gamma ٣", "not a whole number"),
    ("/gamma 4 5", "not a whole number"),
    ("/length 0", "1 to 256; the nearest is 1"),
    ("/length 257", "1 to 256; the nearest is 256"),
    ("/seed -1", "0 to 4294967295"),
    ("/seed 4294967296", "the nearest is 4294967295"),
    ("/beams 17", "0 to 16"),
    ("/top_k_filler 0", "1 to 64"),
    ("/debug maybe", "choose one of on, off, full"),
    ("/verify blok", "choose one of rejection, coupled, block. Did you mean block?"),
    ("/speculative 1", "neither on nor off"),
    ("/processor nuclues 0.8 0.9", "Did you mean nucleus?"),
    ("/processor nucleus", "T 0 to 100, P above 0, at most 1"),
    ("/processor nucleus 0.8", "for example: /processor nucleus 0.8 0.95"),
    ("/processor nucleus 0.8 0", "top-p 0 is out of range"),
    ("/processor nucleus 0.8 1.5", "top-p 1.5 is out of range"),
    ("/processor nucleus nan 0.5", "'nan' is not a number"),
    ("/processor multinomial inf", "'inf' is not a number"),
    ("/processor multinomial 101", "temperature 101 is out of range: 0 to 100"),
    ("/processor multinomial -1", "temperature -1 is out of range"),
    ("/processor topk 1 0", "1 to 300; the nearest is 1"),
    ("/processor topk 1 301", "the nearest is 300"),
    ("/processor topk 1 2.5", "not a whole number"),
    ("/processor greedy 1 2", "greedy takes [T]"),
    ("/set_ngramstorage basic", "'basic N' or 'onelevel N'"),
    ("/set_ngramstorage tree 3", "choose one of basic, onelevel"),
    ("/set_ngramstorage onelvel 3", "Did you mean onelevel?"),
    ("/set_ngramstorage basic 1", "2 to 16; the nearest is 2"),
    ("/set_ngramstorage basic x", "not a whole number"),
    ("/say", "give the text to send"),
    ("/help gama", "the nearest is /gamma"),
    ("/gama 3", "There is no command /gama; the nearest is /gamma."),
    ("/xyzzy", "/help lists them"),
    ("/", "There is no command /"),
    ("/Gamma 3", "the nearest is /gamma"),
    ("/ gamma 3", "There is no command /"),
    ("/quit now", "/quit takes no argument; 'now' is one too many."),
    ("/show gamma", "takes no argument"),
]


@pytest.mark.parametrize(("line", "answer"), BAD)
def test_bad_values_get_one_sentence_and_change_nothing(line: str, answer: str, bench: Workbench, view: Screen) -> None:
    before = bench.settings
    assert bench.handle(line) is Verdict.FAILED
    results, messages = view.take()
    assert bench.settings is before
    assert results == "" and answer in messages and messages.count("\n") == 1
    assert "Traceback" not in messages


@pytest.mark.parametrize(
    "line", ["/processor", "/gamma", "/system ", "/seed", "/set_ngramstorage", "/length", "/beams"]
)
def test_a_command_without_its_value_shows_it(line: str, bench: Workbench, view: Screen) -> None:
    if line.startswith("/system"):
        line = "/system"
    assert bench.handle(line) is Verdict.DONE
    assert line.strip().removeprefix("/") in view.take()[1]


def test_help_shows_every_command_with_its_current_value(bench: Workbench, view: Screen) -> None:
    bench.handle("/gamma 9")
    view.take()
    bench.handle("/help")
    text = view.take()[0]
    for command in default_registry():
        assert f"/{command.name}" in text
    assert next(line for line in text.splitlines() if line.startswith("/gamma")).split()[2] == "9"


def test_help_of_one_command_and_show(bench: Workbench, view: Screen) -> None:
    bench.handle("/help top_k_filler")
    assert "target's top tokens" in view.take()[0]
    bench.handle("/show")
    text = view.take()[0]
    assert all(
        part in text for part in ("tiny-target", "tiny-drafter (model)", "cpu", "float32, ", "greedy", "256 tokens")
    )


def test_chat_stays_off_without_a_template_and_says_so(view: Screen) -> None:
    bench = workbench(view, tiny_pair(chat=False))
    assert not bench.settings.chat
    assert "no chat template" in view.take()[1]
    bench.handle("/chat on")
    assert not bench.settings.chat
    assert "no chat template" in view.take()[1]


def test_a_setting_without_effect_says_so(bench: Workbench, view: Screen) -> None:
    bench.handle("/system Be brief.")
    assert "no effect" not in view.take()[1]
    bench.handle("/chat off")
    bench.handle("/system Be brief.")
    assert "(no effect while /chat is off)" in view.take()[1]


@pytest.mark.parametrize(
    "line", ["multinomial 0.123456789", "topk 100 2", "nucleus 1e-07 0.9999999", "topknucleus 33.333333333 7 0.1"]
)
def test_a_shown_processor_can_be_typed_again_without_loss(line: str) -> None:
    kind = ProcessorKind()
    value = kind.parse(line, None, Limits())
    assert kind.parse(kind.show(value), None, Limits()) == value


def test_quit_and_clear(bench: Workbench) -> None:
    assert bench.handle("/quit") is Verdict.QUIT
    assert bench.handle("/clear") is Verdict.DONE


@pytest.mark.parametrize("line", ["", "   ", "\t"])
def test_blank_lines_do_nothing(line: str, bench: Workbench, view: Screen) -> None:
    assert bench.handle(line) is Verdict.DONE
    assert view.take() == ("", "")


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(max_size=25),
    name=st.sampled_from([command.name for command in default_registry() if command.name != "save"] + [""]),
)
def test_no_argument_is_a_crash_or_leaves_a_bad_value(text: str, name: str) -> None:
    """Random arguments to every command but the one that would write files of these names: an outcome or one sentence."""
    from utils.commands import Situation
    from utils.errors import UserError

    registry, limits, bench = default_registry(), Limits(256, 300), Bench(PAIR, infer.STRATEGIES, infer.STORAGE, 300)
    try:
        outcome = registry.run(f"/{name} {text}", Situation(Settings(), registry, bench, limits))
    except UserError as error:
        assert str(error)
        return
    changed = outcome.settings or Settings()
    assert (
        (changed.gamma is None or 0 <= changed.gamma <= 63)
        and changed.drafter_kind
        and 1 <= changed.length <= 256
        and 1 <= changed.top_k_filler <= 64
        and 0 <= changed.beams <= 16
    )
