"""Prompts in a session with tiny models: what is run, shown and recorded."""

import re
import sys
from pathlib import Path

import pytest
from fakes import Screen, open_session, records_of, screen, table_pair, tiny_pair
from paths import ROOT

from sampling import autoregressive_generate
from utils.decode.steps import Step
from utils.metrics.results import RoundTiming
from utils.prompts.conversation import prompt_ids
from utils.repl.repl_session import ReplSession, Verdict
from utils.screen.renderer import Text
from utils.screen.run_view import show_round

FIELDS = {
    "schema",
    "record",
    "prompt",
    "turn",
    "history",
    "strategy",
    "drafter_kind",
    "text",
    "token_ids",
    "server",
    "prompt_tokens",
    "new_tokens",
    "tokens_counted_by",
    "finish",
    "finish_reason",
    "seconds",
    "first_token_seconds",
    "tokens_per_second",
    "decode_tokens_per_second",
    "acceptance_is_valid",
    "acceptance_note",
    "other_tokens",
    "baseline",
    "decode_speedup_vs_baseline",
    "first_difference_in",
    "drafted",
    "accepted",
    "forced",
    "acceptance_rate",
    "rounds",
    "target_forwards",
    "tokens_per_target_forward",
    "accepted_by_position",
    "accepted_by_span",
    "declined_rounds",
    "draft_seconds",
    "verify_seconds",
    "speedup_vs_baseline",
    "same_as_baseline",
    "first_difference",
    "divergence",
    "seed",
    "settings",
    "models",
    "engine",
    "versions",
    "machine",
}


def test_a_prompt_runs_every_enabled_strategy_and_compares(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    session = open_session(view, records=file)
    for line in ("/drafter on", "/beams 3", "/length 12"):
        session.handle(line)
    view.take()
    assert session.handle("Hello there") is Verdict.DONE
    results, messages = view.take()
    assert messages == ""
    for title in ("Speculative", "N-gram assisted (NASD)", "Target only", "Drafter only", "Beam search"):
        assert title in results
    table = results[results.index("strategy ") :].splitlines()[:6]
    assert [line.split()[0] for line in table[1:]] == ["speculative", "ngram", "target", "drafter", "beam"]
    assert all(line.rstrip().endswith("same") for line in table[1:4])
    assert "1.00x" in table[3]
    rows = records_of(file)
    assert [row["strategy"] for row in rows] == ["speculative", "ngram", "target", "drafter", "beam"]
    assert all(set(row) == FIELDS for row in rows)


def test_records_match_the_runs(view: Screen, tmp_path: Path) -> None:
    file, pair = tmp_path / "runs.jsonl", tiny_pair()
    session = open_session(view, pair, records=file)
    session.handle("/length 20")
    session.handle("one two one two")
    ids = prompt_ids(pair.tokenizer, "one two one two", chat=True, system=None)
    expected = autoregressive_generate(ids, pair.target, 20, eos_tokens_id=pair.end_ids)
    for row in records_of(file):
        assert row["token_ids"] == expected and row["same_as_baseline"] is True and row["first_difference"] is None
        assert row["new_tokens"] == len(expected) and row["prompt_tokens"] == len(ids)
        assert row["text"] == pair.tokenizer.decode(expected, skip_special_tokens=True)
        assert row["finish"] == ("stop" if expected[-1] in pair.end_ids else "length")
        assert row["tokens_per_second"] == pytest.approx(row["new_tokens"] / row["seconds"])
        assert 0 < row["first_token_seconds"] <= row["seconds"]
        assert row["seed"] == 42 and row["settings"]["gamma"] == 4 and row["settings"]["processor"] == "greedy"
        assert row["models"] == {
            "target": "tiny-target",
            "drafter": "tiny-drafter",
            "dtype": "float32",
            "device": "cpu",
            "quantize": "none",
            "memory": sum(weight.nbytes for weight in pair.target.parameters())
            + pair.target.model.rotary_emb.inv_freq.nbytes * 2,
            "drafter_dtype": "float32",
            "drafter_quantize": "none",
            "drafter_memory": pair.drafter_memory,
        }
        assert row["versions"]["torch"] and row["machine"]["cpu"]
    speculative, ngram, target = records_of(file)
    assert target["speedup_vs_baseline"] == 1.0 and target["target_forwards"] == len(expected)
    assert all(
        target[name] is None
        for name in ("drafted", "accepted", "acceptance_rate", "rounds", "accepted_by_position", "drafter_kind")
    )
    for row in (speculative, ngram):
        assert row["rounds"] == row["target_forwards"]
        assert row["accepted"] + row["rounds"] - (
            row["finish"] == "stop" and row["accepted"] + row["rounds"] > len(expected)
        ) == len(expected)
        assert sum(accepted for accepted, _ in row["accepted_by_position"]) == row["accepted"]
        assert row["speedup_vs_baseline"] == pytest.approx(row["tokens_per_second"] / target["tokens_per_second"])
    assert (speculative["drafter_kind"], ngram["drafter_kind"]) == ("chain", "ngram")


def test_without_the_target_nothing_is_compared(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    session = open_session(view, records=file)
    session.handle("/target off")
    session.handle("Hello")
    rows = records_of(file)
    assert [row["strategy"] for row in rows] == ["speculative", "ngram"]
    assert all(
        row[name] is None for row in rows for name in ("speedup_vs_baseline", "same_as_baseline", "first_difference")
    )


def test_the_same_prompt_gives_the_same_texts_in_any_order(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    session = open_session(view, records=file)
    session.handle("/processor nucleus 1.2 0.95")
    for line in ("Hello", "something else", "Hello", "/speculative off", "Hello"):
        session.handle(line)
    rows = records_of(file)
    by_prompt = [[(row["strategy"], row["token_ids"]) for row in rows[start : start + 3]] for start in (0, 6)]
    assert by_prompt[0] == by_prompt[1]
    assert [(row["strategy"], row["token_ids"]) for row in rows[9:]] == by_prompt[0][1:]
    session.handle("/seed 43")
    session.handle("Hello")
    assert records_of(file)[-1]["token_ids"] != rows[-1]["token_ids"]


def test_cache_off_and_gamma_zero_give_the_same_texts(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    session = open_session(view, records=file)
    for line in ("/length 15", "Hello", "/cache off", "Hello", "/gamma 0", "Hello"):
        session.handle(line)
    rows = records_of(file)
    assert len({tuple(row["token_ids"]) for row in rows}) == 1
    assert (
        rows[6]["drafted"] == 0
        and rows[6]["acceptance_rate"] is None
        and rows[6]["declined_rounds"] == rows[6]["rounds"]
    )


def test_plain_output_and_model_text_contain_no_escape_sequences(view: Screen) -> None:
    session = open_session(view)
    session.handle("Hello")
    assert "\x1b" not in view.take()[0]
    view.renderer.stream(Text("\x1b[2J\x7f[bold]"))
    view.renderer.error("\x1b[31m[red]x")
    assert view.take() == ("\u241b[2J\u2421[bold]", "\u241b[31m[red]x\n")


def test_typed_escapes_are_newline_and_tab_and_quotes_send_text_unchanged(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    session = open_session(view, records=file)
    quoted = (r'"""/gamma 3 \n"""', '  """  two  words"""', '"""\n/a\n/b\n"""')
    for line in ("/speculative off", "/ngram off", "/length 1", r"a\nb\tc", *quoted, '""""""'):
        session.handle(line)
    session.send("/gamma 9")
    assert [row["prompt"] for row in records_of(file)] == [
        "a\nb\tc",
        r"/gamma 3 \n",
        "  two  words",
        "/a\n/b",
        "/gamma 9",
    ]
    assert session.settings.gamma == 4


def test_the_storage_is_emptied_between_prompts_by_default(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    session = open_session(view, records=file)
    for line in ("/speculative off", "/length 20", "Hello", "Hello", "/reset_in_between off", "Hello"):
        session.handle(line)
    ngram = [row for row in records_of(file) if row["strategy"] == "ngram"]
    assert ngram[0]["accepted"] == ngram[1]["accepted"] < ngram[2]["accepted"]
    session.handle("/set_ngramstorage onelevel 4")
    session.handle("Hello")
    assert records_of(file)[-2]["settings"]["ngram_storage"] == "onelevel 4"


def test_without_a_drafter_its_strategies_are_omitted_with_a_note(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    session = open_session(view, table_pair(drafter=False), records=file)
    assert session.handle("Hello") is Verdict.DONE
    assert view.take()[1].count("\n") == 1
    assert [row["strategy"] for row in records_of(file)] == ["ngram", "target"]


def test_encoder_decoder_pairs_run_every_strategy(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    session = open_session(view, tiny_pair(kind="t5", chat=False), records=file)
    session._loaded.warm_up()
    for line in ("/drafter on", "/beams 2", "/length 12", "Hello there"):
        session.handle(line)
    rows = {row["strategy"]: row for row in records_of(file)}
    assert len(rows) == 5
    assert rows["speculative"]["token_ids"] == rows["ngram"]["token_ids"] == rows["target"]["token_ids"]


def test_a_narrow_screen_omits_columns_and_breaks_no_word() -> None:
    view = screen(width=60)
    session = open_session(view)
    session.handle("Hello")
    table = view.take()[0].split("strategy")[1]
    assert "seconds" not in table and "acceptance" in table and "speed-up" in table


def test_warming_up_shows_and_records_nothing(view: Screen) -> None:
    session = open_session(view)
    session._loaded.warm_up()
    assert view.take() == ("", "")


def test_debug_shows_a_line_per_round_and_then_the_text(view: Screen) -> None:
    session = open_session(view)
    for line in ("/ngram off", "/target off", "/length 6", "/gamma 2", "/debug on"):
        session.handle(line)
    view.take()
    session.handle("Hello")
    lines = view.take()[0].splitlines()
    rounds = [line for line in lines if " | other " in line]
    assert len(rounds) >= 2 and all(line.split()[0] == str(number) for number, line in enumerate(rounds, start=1))
    for line in rounds:
        signs = "".join(re.findall(r' ([+=*-])(?:"|#)', line))
        assert re.fullmatch(r"\+*(-*=|\*)|\++", signs), line
        assert re.search(r"   draft \d+\.\d | verify \d+\.\d | other \d+\.\d ms | \+\d$", line)


def test_colours_in_debug_are_green_red_and_blue() -> None:
    view = screen(colour=True)
    show_round(view.renderer, 1, Step((5, 6), 1, 7), None, timing=RoundTiming(0, 0, 0))
    show_round(view.renderer, 2, Step((5,), 1, 7), None, timing=RoundTiming(0, 0, 0))
    first, second = view.take()[0].splitlines()
    assert "\x1b[32m+5" in first and "\x1b[31m-6" in first and "\x1b[34m=7" in first
    assert "\x1b[34m*7" in second


@pytest.mark.parametrize("word", ["exit", "QUIT", "Quit "])
def test_a_lone_exit_or_quit_ends_the_session(word: str, view: Screen) -> None:
    session = open_session(view)
    assert session.handle(word) is Verdict.QUIT and session.harness.state.last is None


@pytest.mark.parametrize("word", ["help", "HELP", "?"])
def test_a_lone_help_shows_the_commands(word: str, view: Screen) -> None:
    session = open_session(view)
    assert session.handle(word) is Verdict.DONE
    assert "/gamma" in view.take()[0] and session.harness.state.last is None


@pytest.mark.parametrize("line", [" exit", '"""exit"""', "exit now", "help?"])
def test_other_lines_with_these_words_are_prompts(line: str, view: Screen) -> None:
    session = open_session(view)
    session.handle("/length 2")
    assert session.handle(line) is Verdict.DONE
    last = session.harness.state.last
    assert last is not None and last.text == line.strip(' "')


def test_prompts_of_a_file_are_never_commands(view: Screen) -> None:
    session = open_session(view)
    session.handle("/length 2")
    assert session.send("quit") is Verdict.DONE
    assert session.harness.state.last is not None and session.harness.state.last.text == "quit"


ONE = r"\b1 (tokens|layers|positions|rounds|drafters|n-grams|runs|prompts|texts|repeats|settings|threads|turns)\b"


def test_one_is_singular(view: Screen, tmp_path: Path) -> None:
    session = open_session(view)
    (tmp_path / "one.jsonl").write_text('{"prompt": "Hello"}\n')
    lines = ("/length 1", "/threads 1", "Hello", "/texts", "/explain text", "/audit 1", "/race 1")
    sampling = ("/processor multinomial 1", "/lossless 1", f"/race 1 {tmp_path / 'one.jsonl'}", "/whatif", "/why")
    for line in (*lines, *sampling, "Hello there " * 200):
        session.handle(line)
        shown = "".join(view.take())
        assert not re.search(ONE, shown), (line, re.search(ONE, shown))


def entered(session: ReplSession, line: str) -> set[str]:
    """The files of the program with a function that a line calls."""
    names = set[str]()
    sys.setprofile(lambda frame, event, argument: names.add(frame.f_code.co_filename))
    try:
        session.handle(line)
    finally:
        sys.setprofile(None)
    files = {Path(name).relative_to(ROOT).as_posix() for name in names if name.startswith(f"{ROOT}/")}
    return {name for name in files if name.startswith(("utils/", "sampling/", "ngram_assisted/"))}


def test_a_prompt_and_a_setting_enter_few_files(view: Screen) -> None:
    session = open_session(view)
    session.handle("/length 2")
    source = entered(session, "Hello")
    assert source and not [name for name in source if "servers" in name] and len(source) <= 35, sorted(source)
    assert 0 < len(entered(session, "/gamma 3")) <= 12
    for line in ("/speculative off", "/ngram off"):
        session.handle(line)
    assert 0 < len(entered(session, "Hello")) <= 29, "the target alone"
