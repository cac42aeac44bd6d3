"""Lines and prompts from -c, standard input and prompt files: what is run, in which order, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from fakes import records_of

from utils.errors import UserError
from utils.prompts.prompt_files import read_prompts


def test_lines_of_dash_c_run_in_order_and_messages_go_to_standard_error(
    folder: Path, tmp_path: Path, main: Any
) -> None:
    file = tmp_path / "runs.jsonl"
    result = main("--target", folder, "--json", file, "-c", "/length 6", "-c", "Hello", "-c", "/gamma 2", "-c", "Hello")
    assert result.returncode == 0, result.stderr
    assert "Target only" in result.stdout and "gamma: 2" in result.stderr and "gamma: 2" not in result.stdout
    assert "\x1b" not in result.stdout + result.stderr
    assert [(row["strategy"], row["settings"]["gamma"]) for row in records_of(file)] == [
        (name, gamma) for gamma in ("auto", 2) for name in ("speculative", "ngram", "target")
    ]
    assert records_of(file)[0]["drafter_kind"] == "chain"
    assert all(row["same_as_baseline"] for row in records_of(file))


@pytest.mark.parametrize("end", ["\n", pytest.param("", marks=pytest.mark.full)])
def test_piped_lines_run_one_by_one(end: str, folder: Path, tmp_path: Path, main: Any) -> None:
    file = tmp_path / "runs.jsonl"
    result = main("--target", folder, "--json", file, stdin='/length 4\n\n"""/gamma"""\nHello' + end)
    assert result.returncode == 0, result.stderr
    assert [row["prompt"] for row in records_of(file)] == ["/gamma"] * 3 + ["Hello"] * 3


def test_only_newlines_end_piped_lines(folder: Path, tmp_path: Path, main: Any) -> None:
    file = tmp_path / "runs.jsonl"
    lines = (
        "/length 1",
        "/speculative off",
        "/ngram off",
        "/system a\u2028/seed 7",
        "a\r/seed 7",
        "b\x0c/seed 7\r",
        "Hello",
    )
    assert main("--target", folder, "--json", file, stdin="\n".join(lines)).returncode == 0
    rows = records_of(file)
    assert [row["prompt"] for row in rows] == ["a\r/seed 7", "b\x0c/seed 7", "Hello"]
    assert {row["seed"] for row in rows} == {42} and {row["settings"]["system"] for row in rows} == {"a\u2028/seed 7"}


def test_a_failed_line_gives_status_one_and_the_rest_still_runs(folder: Path, main: Any) -> None:
    result = main("--target", folder, "-c", "/gamma abc", "-c", "/length 3", "-c", "Hello")
    assert result.returncode == 1 and "Target only" in result.stdout and "abc" in result.stderr
    assert main("--target", folder, stdin="/nonsense\n/quit\nnever run").returncode == 1


def test_quit_ends_the_lines(folder: Path, main: Any) -> None:
    result = main("--target", folder, stdin="/quit\nHello\n")
    assert result.returncode == 0 and result.stdout == ""


def test_a_prompt_of_the_command_line_runs_exactly_as_given_after_the_lines(
    folder: Path, tmp_path: Path, main: Any
) -> None:
    file = tmp_path / "runs.jsonl"
    result = main("--target", folder, "--json", file, "-c", "/length 2", "/gamma a\\nb")
    assert result.returncode == 0, result.stderr
    assert [row["prompt"] for row in records_of(file)] == ["/gamma a\\nb"] * 3


def test_prompt_files_contain_plain_and_json_lines_but_no_commands(folder: Path, tmp_path: Path, main: Any) -> None:
    prompts, file = tmp_path / "prompts", tmp_path / "runs.jsonl"
    prompts.write_text('/quit\n\na\\nb\n{"prompt": "c\\nd", "id": 3}\n{"prompt": "e\\\\nf"}', encoding="utf-8")
    flags = ("-c", "/length 2", "-c", "/speculative off", "-c", "/ngram off")
    result = main("--target", folder, "--prompts", prompts, "--json", file, *flags)
    assert result.returncode == 0, result.stderr
    assert [row["prompt"] for row in records_of(file)] == ["/quit", "a\nb", "c\nd", "e\\nf"]


def test_later_turns_of_a_prompt_file_are_not_left_out_silently(folder: Path, tmp_path: Path, main: Any) -> None:
    prompts, file, shown = tmp_path / "prompts", tmp_path / "runs.jsonl", []
    for text in ('{"turns": ["a", "b"]}', '{"prompt": "a"}'):
        prompts.write_text(text)
        shown.append(main("--target", folder, "--prompts", prompts, "--json", file, "-c", "/length 2").stderr)
    assert {row["prompt"] for row in records_of(file)} == {"a"}
    assert "first turn" in shown[0] and "first turn" not in shown[1]


@pytest.mark.parametrize("text", ['{"words": "x"}', '{"prompt": 3}', '{"prompt": "', '{"prompt": " "}', None])
def test_a_bad_prompt_file_is_reported(text: str | None, folder: Path, tmp_path: Path, main: Any) -> None:
    prompts = tmp_path / "prompts"
    if text is not None:
        prompts.write_text(text)
    result = main("--target", folder, "--prompts", prompts)
    assert result.returncode == 1 and "Traceback" not in result.stderr and str(prompts) in result.stderr


def test_prompt_files_may_have_a_byte_order_mark_and_any_characters(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text('\ufeff{"prompt": "a\u2028b"}\r\nc\u0085d\r\n', encoding="utf-8", newline="")
    assert [prompt.text for prompt in read_prompts(prompts)] == ["a\u2028b", "c\u0085d"]
    prompts.write_text('{"prompt": ' + "[" * 100_000)
    with pytest.raises(UserError, match="line 1"):
        list(read_prompts(prompts))
