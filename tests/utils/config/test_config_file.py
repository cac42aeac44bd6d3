"""The config file: pairs and settings of the user, overridden by flags."""

from contextlib import suppress
from pathlib import Path

import pytest

import infer
from utils.config.arguments import config_file, parse_arguments, read_config
from utils.config.settings import as_json
from utils.config.value_types import Limits
from utils.errors import UserError
from utils.pairs.request import request_from_flags

COMPLETE = """
pair = "mine"
device = "cpu"
quantize = "int8"

[settings]
gamma = 4
processor = "nucleus 0.8 0.95"
chat = false
seed = 7

[pairs.mine]
target = "/models/big"
drafter = "/models/small"

[pairs.alone]
target = "some/model@v1"
summary = "without a drafter"
"""


@pytest.fixture(autouse=True)
def _config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(COMPLETE)
    return path


def test_pairs_flags_and_settings_are_read(file: Path) -> None:
    arguments = parse_arguments(["--config", str(file)])
    request, settings = request_from_flags(arguments), infer.first_settings(arguments, Limits())
    assert (request.target, request.drafter, request.device, request.quantize) == (
        "/models/big",
        "/models/small",
        "cpu",
        "int8",
    )
    assert (settings.gamma, as_json(settings)["processor"], settings.chat, settings.seed) == (
        4,
        "nucleus 0.8 0.95",
        False,
        7,
    )
    assert {"mine", "alone", "embedded"} <= set(arguments.config.pairs)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--gamma", "3"], ['-c "/gamma 3"']),
        (["--gamma=auto"], ['-c "/gamma auto"']),
        (["--top-k", "40", "hello"], ['-c "/top_k 40"']),
        (["--ngram-order", "4"], ['-c "/ngram order 4"']),
        (["--drafer", "x"], ["--drafter", '-c "/gamma 3"']),
        (["--prompt", "x"], ["--prompts"]),
        (["two", "words"], ["quotation marks", "words"]),
        (["--pair", "\x1b[31mred"], ["embedded"]),
    ],
)
def test_wrong_usage_is_one_line_that_says_what_to_write(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(words)
    message = capsys.readouterr().err
    assert caught.value.code == 2 and message.count("\n") == 1 and "\x1b" not in message
    assert all(part in message for part in parts), message


def test_flags_override_the_config_file(file: Path) -> None:
    flags = ["--pair", "alone", "--quantize", "none", "--seed", "9", "--engine", "plain", "-c", "/show"]
    arguments = parse_arguments(["--config", str(file), *flags])
    request, settings = request_from_flags(arguments), infer.first_settings(arguments, Limits())
    assert (request.target, request.drafter, request.device, request.quantize) == ("some/model@v1", None, "cpu", "none")
    assert (settings.seed, settings.engine, settings.gamma, arguments.lines) == (9, "plain", 4, ["/show"])
    assert request_from_flags(parse_arguments(["--config", str(file), "--target", "x"])).drafter is None


def test_the_default_file_is_read_if_it_exists(file: Path) -> None:
    assert request_from_flags(parse_arguments([])).target == "embedded"
    config_file().parent.mkdir(parents=True)
    config_file().write_text(COMPLETE)
    assert request_from_flags(parse_arguments([])).target == "/models/big"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pair = ", "TOML"),
        (f"[settings]\ngamma = {'1' * 5000}", "is not valid TOML"),
        (f"[settings]\ngamma = 0x{'f' * 5000}", "settings.gamma"),
        ("pear = 1", "Did you mean pair?"),
        ('pair = "mine"', "pair 'mine' is unknown"),
        ('device = "tpu"', "is not a device"),
        ('quantize = "int9"', "Did you mean int8?"),
        ("settings = 3", "must be a table"),
        ("[pairs.x]\ndrafter = 'y'", "pairs.x needs a target"),
        ("[pairs.x]\ntarget = 'y'\ndrafer = 'z'", "Did you mean drafter?"),
        ("[settings]\ngamma = [1]", "settings.gamma must be a text"),
    ],
)
def test_invalid_entries_are_refused_in_one_sentence(
    file: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    file.write_text(text)
    with pytest.raises(UserError, match=str(file)) as caught:
        read_config(file)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(SystemExit) as left:
        parse_arguments(["--config", str(file)])
    errors = capsys.readouterr().err
    assert left.value.code == 2 and words in errors and "?." not in errors


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gama = 3", "Did you mean gamma?"),
        ("top_k_filler = 2", "ngram_candidates"),  # aliases are for commands only
        ("gamma = 99", "settings.gamma: "),
        ("seed = -1", "settings.seed: "),
        ('cache = ""', "settings.cache: "),
    ],
)
def test_invalid_settings_are_reported_before_anything_is_loaded(
    file: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    file.write_text(f"[settings]\n{line}\n")
    assert infer.main(["--config", str(file), "-c", "/show"]) == 1
    errors = capsys.readouterr().err
    assert words in errors and "loading" not in errors and str(file) in errors


def test_a_byte_order_mark_is_no_entry(file: Path) -> None:
    file.write_text("\ufeff" + COMPLETE)
    assert read_config(file).settings["gamma"] == "4"


@pytest.mark.parametrize("text", ['pair = "\\u001b[31mred"', '"\\u001b[31m" = 1', '[settings]\n"\\u001b[31m" = 1'])
def test_control_characters_do_not_reach_the_terminal(
    file: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file.write_text(text)
    with suppress(SystemExit):  # a setting is an error of its own
        assert infer.main(["--config", str(file), "-c", "/show"]) == 1
    shown = "".join(capsys.readouterr())
    assert "[31m" in shown and "\x1b" not in shown


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(UserError, match=str(path)):
            read_config(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="UTF-8"):
        read_config(tmp_path / "binary")
