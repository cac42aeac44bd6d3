"""The shape of the source: packages import downwards only, one module writes to the screen, functions and files stay
short, those of the tests too.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

# From top to bottom: each folder imports only from rows below its own. `utils` means the modules at its top level.
LADDER = (
    "infer",
    "sampling.distill",
    "utils.repl",
    "utils.commands",
    "utils.commands.servers",
    "utils.commands.verdicts",
    "utils.commands.experiments",
    "utils.commands.shared",
    "utils.screen",
    "utils.comparison",
    "utils.config",
    "utils.servers",
    "utils.servers.kinds",
    "utils.servers.processes",
    "utils.pairs",
    "utils.prompts",
    "ngram_assisted",
    "sampling",
    "sampling.drafters",
    "utils.drafter_formats",
    "utils.models",
    "utils.engine",
    "utils.metrics",
    "utils.decode",
    "utils",
)
# Started by --help, so they must not import torch; nor must what talks to servers, which needs no model.
LIGHT = ("utils.config.arguments", "utils.pairs.request", "utils.servers.client", "utils.servers.kinds")
# The most modules that a module may bring with it, itself included.
CLOSURES = {"sampling.speculative": 35, "utils.config.settings": 20}
SCREEN_LIBRARIES = {"rich", "termcolor"}
LAYS_OUT = "utils.screen.renderer"
# Signatures that users of the library call by position, and overrides whose caller is another library.
PUBLIC = (
    "speculative_generate",
    "beam_search_generate",
    "autoregressive_generate",
    "ngram_assisted_speculative_generate",
)
OVERRIDES = ("row_invariant_attention", "unrolled_attention", "forward")
MOST_POSITIONAL, MOST_FUNCTION_LINES, MOST_FILE_LINES = 4, 45, 600
MOST_TEST_FILE_LINES = 600


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path
    for path in (
        ROOT / "infer.py",
        *(path for top in ("utils", "sampling", "ngram_assisted") for path in (ROOT / top).rglob("*.py")),
    )
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def imported(name: str) -> Iterator[str]:
    """The modules that a module imports, anywhere in it, by their full names."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (
                full if (full := f"{node.module}.{alias.name}") in SOURCES else node.module for alias in node.names
            )


def row_of(name: str) -> int:
    """The row of a module's package. Modules directly in `utils` are the lowest row."""
    return max(
        (row for row in range(len(LADDER)) if f"{name}.".startswith(f"{LADDER[row]}.")),
        key=lambda row: len(LADDER[row]),
    )


def upward_imports() -> Iterator[tuple[str, str]]:
    """Modules, and what they import from a row above their own."""
    for name in SOURCES:
        for other in imported(name):
            if other in SOURCES and row_of(other) < row_of(name):
                yield name, other


def test_folders_import_downwards_only() -> None:
    assert not list(upward_imports())


def test_every_folder_has_a_row() -> None:
    packages = {module_name(path) for path in SOURCES.values() if path.name == "__init__.py"}
    assert packages == set(LADDER) - {"infer"}


def closure(*names: str) -> set[str]:
    """Modules, and all that they import, directly or not."""
    seen, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += [other for other in imported(name) if other in SOURCES]
    return seen


def test_the_loop_and_the_settings_bring_few_modules() -> None:
    for name, most in CLOSURES.items():
        assert len(closure(name)) <= most, sorted(closure(name))


def test_an_upward_import_is_noticed() -> None:
    """A mutant of the ladder itself: the lowest decoder row must be seen as lower than the screen."""
    assert (
        row_of("utils.screen.renderer")
        < row_of("sampling.speculative")
        < row_of("utils.decode.steps")
        < row_of("utils.errors")
    )


def test_commands_do_not_import_each_other() -> None:
    """A file of the folder of commands imports no other file of it; what several share lies in a folder below."""
    folder = "utils.commands"
    for name in SOURCES:
        if name.rpartition(".")[0] == folder:
            others = [other for other in imported(name) if other.rpartition(".")[0] == folder and other not in LADDER]
            assert not others, f"{name} imports {others}"


def test_flags_and_the_config_file_import_no_torch() -> None:
    for name in closure(*LIGHT):
        assert not any(other.split(".")[0] in ("torch", "transformers") for other in imported(name)), name


def test_only_the_screen_package_writes_to_the_screen() -> None:
    for name in SOURCES:
        libraries = {other.split(".")[0] for other in imported(name) if other != "rich.filesize"}
        assert name == LAYS_OUT or not libraries & SCREEN_LIBRARIES, name


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for name, tree in TREES.items():
        yield from ((name, node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_functions_take_few_positional_parameters() -> None:
    for name, node in functions():
        if node.name not in (*PUBLIC, *OVERRIDES):
            positional = [
                argument.arg
                for argument in node.args.posonlyargs + node.args.args
                if argument.arg not in ("self", "cls")
            ]
            assert len(positional) <= MOST_POSITIONAL, f"{name}: {node.name}"


def test_functions_and_files_stay_readable() -> None:
    for name, node in functions():
        assert (node.end_lineno or 0) - node.lineno < MOST_FUNCTION_LINES, f"{name}: {node.name}"
    for name, path in SOURCES.items():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_FILE_LINES, name


def test_test_files_stay_readable() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_TEST_FILE_LINES, path
