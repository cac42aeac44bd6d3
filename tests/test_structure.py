"""The import order: utils <- sampling <- ngram_assisted <- infer.py; and one place each for printing and for model calls."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {"utils": {"utils"}, "sampling": {"utils", "sampling"}, "ngram_assisted": {"utils", "sampling", "ngram_assisted"}}
OURS = {*MAY_IMPORT, "infer", "tests"}


def imports(path: Path) -> set[str]:
    """Top-level names of every module that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_downwards_only(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        assert imports(path) & OURS <= MAY_IMPORT[package], path


def test_only_the_renderer_writes_to_the_screen() -> None:
    for path in [ROOT / "infer.py", *(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))]:
        if path != ROOT / "utils" / "printing.py":
            lays_out = {"rich"} if path.name in ("tables.py", "pictures.py") else set()  # for it, or for a file
            assert not imports(path) & {"rich", "termcolor"} - lays_out, path


INTERFACES = ("speculative_generate", "beam_search_generate", "autoregressive_generate", "ngram_assisted_speculative_generate")
FOREIGN = ("row_invariant_attention", "forward")  # whoever calls these decides


def test_few_parameters_are_told_apart_by_their_place() -> None:
    for package in MAY_IMPORT:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name not in (*INTERFACES, *FOREIGN):
                    places = [argument.arg for argument in node.args.posonlyargs + node.args.args if argument.arg not in ("self", "cls")]
                    assert len(places) <= 4, f"{path}: {node.name}"


def test_sizes_stay_readable() -> None:
    """Functions of at most 45 lines; the entry point of at most 180."""
    assert len((ROOT / "infer.py").read_text().splitlines()) <= 180
    for path in [ROOT / "infer.py", *(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 45, f"{path}: {node.name}"
