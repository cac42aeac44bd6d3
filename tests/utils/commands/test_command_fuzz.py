"""Thousands of random lines: none ends the session, shows a traceback or leaves an invalid setting."""

import random

import pytest
from fakes import open_session, screen, table_pair

from utils.commands import default_registry
from utils.config.settings import setting_fields
from utils.pairs.load_pair import load_pair
from utils.repl.repl_session import Verdict

SLOW = {"audit", "lossless", "quit", "engine", "threads", "costs", "drafter_kind", "beams"}
SLOW |= {"save", "run", "why", "whatif", "ladder", "race", "sweep", "texts"}
WORDS = (
    *(
        "on",
        "off",
        "auto",
        "none",
        "default",
        "greedy",
        "topk",
        "nucleus",
        "topknucleus",
        "multinomial",
        "rejection",
        "block",
        "coupled",
    ),
    *(
        "order",
        "kind",
        "keep",
        "limit",
        "basic",
        "onelevel",
        "0",
        "1",
        "2",
        "3",
        "-1",
        "1.5",
        "nan",
        "inf",
        "1e999",
        "0x10",
        "٣",
        "²",
        "1_0",
        "99999999999999999999",
        "0.9",
    ),
    *(
        "lookup",
        "suffix",
        "layers:1",
        "layers:-3",
        "layers:",
        "model",
        "head",
        "target=",
        "target=./nowhere",
        "drafter=layers:9",
        "x=y",
        "=",
    ),
    *(
        "'",
        '"',
        "\\",
        "\x00",
        "\x1b[31m",
        "<|im_end|>",
        "[bold]",
        "{}",
        "%s",
        "\u202e",
        "🙂",
        "é",
        "\ud800",
        "/",
        "//",
        "#",
        ";",
        "`ls`",
        "$HOME",
    ),
)


def line(chance: random.Random, names: list[str]) -> str:
    """A command, a misspelt command, or anything else."""
    kind = chance.random()
    if kind < 0.6:
        name = chance.choice(names)
    elif kind < 0.8:
        name = "".join(chance.sample(chance.choice(names), k=2)) + chance.choice(["", "x", "é", "\t"])
    else:
        name = "".join(
            chr(chance.choice([chance.randrange(1, 128), chance.randrange(0x20, 0x2FFF)]))
            for _ in range(chance.randrange(6))
        )
    blank = chance.choice([" ", " ", " ", "  ", "\t", "\n", "\u3000"])
    return (
        chance.choice(["/", "/", "/", " /", "//"])
        + name
        + "".join(blank + chance.choice(WORDS) for _ in range(chance.randrange(4)))
    )


def text(chance: random.Random) -> str:
    """A prompt of arbitrary characters and a word that has a meaning in commands."""
    letters = (
        chr(chance.choice([chance.randrange(128), chance.randrange(0x110000)])) for _ in range(chance.randrange(1, 12))
    )
    return "".join(letters) + chance.choice(WORDS)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
def test_a_thousand_command_lines(seed: int) -> None:
    chance, view, registry = random.Random(seed), screen(), default_registry()
    session = open_session(view, table_pair(), load=load_pair)
    names = [command.name for command in registry if command.name not in SLOW]
    for _ in range(1000):
        typed = line(chance, names)
        verdict = session.handle("/length 1") and session.handle(typed)
        messages = "".join(view.take())
        assert verdict in (Verdict.DONE, Verdict.FAILED) and "Traceback" not in messages, (typed, messages)
        for entry in setting_fields().values():
            value = entry.show(session.settings)
            assert entry.change(session.settings, value, session._loaded.limits) == session.settings, (
                typed,
                entry.name,
                value,
            )
    for typed in ("/gamma 2", "/target on", "hello"):  # a line may have turned every strategy off
        assert session.handle(typed) is Verdict.DONE, view.take()


@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=pytest.mark.full)])
def test_random_prompts(count: int) -> None:
    chance, view = random.Random(9), screen()
    session = open_session(view, table_pair())
    for setup in ("/length 1", "/speculative off", "/ngram off"):
        session.handle(setup)
    for _ in range(count):
        typed = text(chance)
        verdict = session.send(typed)
        out, messages = view.take()
        assert verdict in (Verdict.DONE, Verdict.FAILED) and "Traceback" not in messages, (typed, messages)
        assert "\x1b" not in out + messages and "\x00" not in out + messages


@pytest.mark.parametrize("count", [10_000, pytest.param(333_334, marks=pytest.mark.full)])
def test_a_prompt_of_a_million_characters_is_refused_or_read(count: int) -> None:
    view = screen()
    session = open_session(view, table_pair(max_position_embeddings=512))
    assert session.send("a\u0301🙂" * count) is Verdict.FAILED
    assert "512" in view.take()[1]
