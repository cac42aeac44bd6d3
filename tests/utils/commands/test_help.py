"""/help: what fits on a screen, a page for every command and figure, aliases, and the page of this package."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from fakes import Screen, open_session, records_of, screen
from paths import ROOT

from utils.commands import CommandContext, default_registry
from utils.commands.help import FIGURES
from utils.commands.shared.registry import ALIASES, GROUPS
from utils.config.settings import NGRAM_PARTS, SAMPLING_PARTS, Settings, setting_fields
from utils.repl.repl_session import ReplSession, Verdict

COMMANDS = list(default_registry())
VISIBLE = default_registry().visible()
README = ROOT / "utils" / "commands" / "README.md"
ROWS, WIDTH = 24, 80
FIRST_PAGE, SECOND_PAGE = 16, 33  # the most commands on /help, and further ones on /help all
QUESTIONS = ("race", "why", "whatif")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> ReplSession:
    """A session on a narrow screen after a prompt, in a folder with the files that the examples name."""
    folder = tmp_path_factory.mktemp("files")
    session = open_session(screen(WIDTH), records=folder / "runs.jsonl")
    for line in (
        "/length 3",
        "/processor multinomial 1",
        "Hello",
        f"/ngram save {folder / 'answers.ngrams'}",
        f"/save {folder / 'evening.txt'}",
    ):
        assert session.handle(line) is Verdict.DONE
    (folder / "prompts.jsonl").write_text('{"prompt": "Hello", "task": "code"}\n')
    (folder / "notes.txt").write_text("One two three.")
    assert records_of(folder / "runs.jsonl")
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).write_bytes((folder / "runs.jsonl").read_bytes())
    session.folder = folder  # type: ignore[attr-defined]
    return session


@pytest.mark.parametrize("name", [name for name, row in setting_fields().items() if row.forms])
def test_the_page_of_a_setting_has_every_word_of_it(name: str) -> None:
    assert set(setting_fields()[name].value_type.words) <= set(setting_fields()[name].forms)


def settings_table() -> str:
    """The table of all settings on the page of this package."""
    rows = sorted((row for row in setting_fields().values() if row.group), key=lambda row: GROUPS.index(row.group))
    lines = ["| setting | meaning | default |", "|---|---|---|"]
    for row in (*rows, *SAMPLING_PARTS, *NGRAM_PARTS):
        usage = row.value_type.usage.replace("|", "\\|")
        lines.append(f"| `/{row.name} {usage}` | {row.summary} | {row.show(Settings())} |")
    return "\n".join(lines) + "\n"


def test_the_page_of_this_package_has_a_row_for_each_setting() -> None:
    assert settings_table() in README.read_text(encoding="utf-8"), settings_table()


@cache
def narrow_session() -> tuple[Screen, ReplSession]:
    """A session that only shows pages, which change nothing."""
    view = screen(WIDTH)
    return view, open_session(view)


def shown(line: str) -> list[str]:
    view, session = narrow_session()
    assert session.handle(line) is Verdict.DONE, view.take()
    return "".join(view.take()).splitlines()


def test_help_fits_on_a_screen_and_begins_with_the_question() -> None:
    lines = shown("/help")
    listed = [command for command in VISIBLE if command.rank]
    # The prompt, its line and the toolbar take lines as well.
    assert len(lines) <= ROWS - 4 and len(listed) <= FIRST_PAGE
    assert len(lines) == len(listed) + 2, "no line is broken"
    names = [name for line in lines for name in re.findall(r"/(\w+)", line[:40])]
    assert names[: len(QUESTIONS)] == [name for name in names if name in (*QUESTIONS, "verdict")][: len(QUESTIONS)]
    assert names == [command.name for command in listed] + ["help"] * 2


def test_all_commands_are_listed_in_one_line_each() -> None:
    too_long = [command.name for command in VISIBLE if len(command.summary) > 39 or len(command.typed) > 22]
    assert not too_long, "they need two lines in /help"
    lines = shown("/help all")
    assert len(VISIBLE) <= FIRST_PAGE + SECOND_PAGE, "a new command or setting needs a larger SECOND_PAGE"
    assert len(lines) == len(VISIBLE)
    assert {re.findall(r"/\w+", line)[0] for line in lines} == {f"/{command.name}" for command in VISIBLE}


def test_groups_and_ranks_are_used_once() -> None:
    places = [(command.group, command.rank) for command in VISIBLE if command.rank]
    assert len(set(places)) == len(places) and {group for group, _ in places} <= set(GROUPS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_a_page_that_fits(command) -> None:
    lines = shown(f"/help {command.name}")
    assert len(lines) <= ROWS - 4
    labels = {line.split()[0] for line in lines if not line.startswith(" ")}
    assert {"syntax", "about", "example"} <= labels and command.example


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.example], ids=lambda c: c.name)
def test_the_examples_are_accepted(command, asked: ReplSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(asked.folder)  # type: ignore[attr-defined]
    typed = command.example[0]
    assert typed.startswith(f"> /{command.name}")
    if command.name == "save":
        Path("evening.txt").unlink()
    harness, registry = asked.harness, asked._tools.registry
    registry.run(typed.removeprefix("> "), CommandContext(asked.settings, registry, harness, asked._loaded.limits))


@pytest.mark.parametrize("figure", FIGURES)
def test_figures_are_explained(figure) -> None:
    if figure not in {command.name for command in COMMANDS} | {"verdict"}:
        assert shown(f"/help {figure}")[0].startswith(figure[:20])


def test_help_of_names_that_are_not_known(view: Screen) -> None:
    session = open_session(view)
    assert session.handle("/help /gama") is Verdict.FAILED and "/gamma" in view.take()[1]


SETTINGS = {
    "/set_ngramstorage onelevel 4": "/ngram kind onelevel 4",
    "/top_k_filler 5": "/ngram candidates 5",
    "/ngram_limit 50": "/ngram limit 50",
    "/reset_in_between off": "/ngram keep on",
}


@pytest.mark.parametrize(("alias", "line"), SETTINGS.items())
def test_aliases_of_settings_do_the_same(alias: str, line: str, view: Screen) -> None:
    sessions = open_session(view), open_session(view)
    for session, typed in zip(sessions, (alias, line), strict=True):
        before = session.settings
        assert session.handle(typed) is Verdict.DONE and session.settings != before
    assert sessions[0].settings == sessions[1].settings


def test_help_shows_for_what_an_alias_stands() -> None:
    for name, words in ALIASES.items():
        first, *rest = shown(f"/help {name}")
        assert first.split() == ["alias", f"/{name}", "stands", "for", *f"/{words}".split()]
        assert [line.split() for line in rest] == [line.split() for line in shown(f"/help {words.split()[0]}")]


def test_texts_are_rows_and_reasons(view: Screen) -> None:
    session = open_session(view)
    assert session.handle("/texts") is Verdict.FAILED
    for line in ("/length 8", "/drafter on", "Hello"):
        session.handle(line)
    view.take()
    assert session.handle("/texts") is Verdict.DONE
    assert "drafter" in view.take()[0]


def test_show_gives_each_setting_one_line() -> None:
    view = screen(WIDTH)
    session = open_session(view)
    session.handle("/system " + "Be brief. " * 50)
    session.handle("/costs verify " + "0.123 " * 16 + "; head 0.069; model 0.5")
    view.take()
    assert session.handle("/show") is Verdict.DONE
    lines = view.take()[0].splitlines()
    for name in ("system", "costs"):
        (line,) = (line for line in lines if line.startswith(f"{name} "))
        assert f"... (/{name})" in line


def test_aliases_are_not_listed() -> None:
    assert all(command.summary and command.group for command in COMMANDS)
    assert not set(ALIASES) & {command.name for command in COMMANDS}


def test_every_visible_command_is_on_the_page_of_this_package() -> None:
    page = README.read_text(encoding="utf-8")
    for command in COMMANDS:
        assert re.search(rf"`/{command.name}[ `]", page), command.name


def test_settings_of_a_config_file_may_be_parts_of_settings(tmp_path: Path) -> None:
    from utils.config.settings import apply_typed
    from utils.config.value_types import Limits, ProcessorSpec, StorageSpec

    typed = {"ngram_order": "5", "ngram_keep": "on", "temperature": "0.5", "top_p": "0.9", "ngram_candidates": "2"}
    settings = apply_typed(Settings(), typed, Limits())
    assert settings.ngram_storage == StorageSpec("basic", 5) and not settings.reset_in_between
    assert settings.top_k_filler == 2
    assert settings.processor == ProcessorSpec(0.5, top_p=0.9)


def test_messages_use_no_aliases() -> None:
    alias = re.compile(rf"(?<![\w/])/({'|'.join(ALIASES)})\b")
    for top in ("utils", "sampling", "ngram_assisted"):
        for path in (ROOT / top).rglob("*.py"):
            if not alias.search(source := path.read_text(encoding="utf-8")):
                continue
            nodes = list(ast.walk(ast.parse(source)))
            docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes:
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                    assert not alias.search(node.value), (path.name, node.value)
