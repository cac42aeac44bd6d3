"""/learn: what it needs, the race that decides, /undo, and an n-gram storage from files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fake_training import fake_program, ticks
from fakes import Screen, open_session, records_of, table_pair
from tiny import save_folder, tiny_llama, tiny_tokenizer
from verdict_runs import STEP, Runs, helpful

from ngram_assisted import load_storage
from sampling.distill.__main__ import main as distill
from utils.commands import learn
from utils.comparison import speed_claims, training
from utils.comparison.records import RecordFile
from utils.comparison.strategies import STRATEGIES, Strategy
from utils.decode.steps import Step
from utils.drafter_formats.eagle3_file import Surroundings, new_eagle3, save_eagle3, usual_layers
from utils.engine.compiled_drafter import CompiledDrafter
from utils.errors import UserError
from utils.pairs.load_pair import load_pair
from utils.pairs.request import PairRequest
from utils.repl.repl_session import ReplSession, Verdict

WORDS = ["apple", "pear", "plum", "grape", "melon", "fig", "kiwi", "lime", "date", "peach", "mango", "guava"]
SIZE = 300


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose next token depends on the last one alone, which is soon learned, and a useless drafter."""
    root = tmp_path_factory.mktemp("folders")
    target = tiny_llama(vocab_size=SIZE, num_hidden_layers=1)
    torch.nn.init.zeros_(target.model.layers[0].self_attn.o_proj.weight)
    torch.nn.init.zeros_(target.model.layers[0].mlp.down_proj.weight)
    save_folder(root / "target", target, tiny_tokenizer())
    drafter = new_eagle3(target, usual_layers(1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for part in drafter.parameters():
            torch.nn.init.normal_(part, std=0.3)
    save_eagle3(root / "damaged", drafter, target, Surroundings(None, None, torch.arange(SIZE)))
    (root / "prompts.txt").write_text("".join(f"Tell me about {word}\n" for word in WORDS))
    return root


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where learned drafters are kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "speculative-decoding" / "drafters"


@pytest.fixture
def session(folders: Path, home: Path, view: Screen, tmp_path: Path) -> Iterator[ReplSession]:
    pair = load_pair(PairRequest(str(folders / "target"), str(folders / "damaged"), device="cpu"), lambda line: None)
    made = open_session(view, pair, tmp_path / "records.jsonl", load=load_pair)
    yield made
    made.close()


def trained(session: ReplSession, folders: Path, tmp_path: Path, behaviour: str = "finish") -> None:
    """Begin a training that a fake program takes the place of, and wait until it has ended."""
    mock.patch.object(training, "PROGRAM", fake_program(tmp_path, behaviour)).start()
    assert session.handle(f"/learn 1 {folders / 'prompts.txt'}") is Verdict.DONE
    one, end = session.harness.state.training, time.monotonic() + 60
    while one is not None and one.is_running and behaviour != "forever" and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_damaged_drafter_learns_is_used_and_undone(
    alone: bool,
    session: ReplSession,
    folders: Path,
    home: Path,
    view: Screen,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real training, of 64 steps in seconds, with a larger learning rate: alone in its process at the usual
    priority, or in this one with the arguments of that process. All rounds of the race take the same time, so only
    accepted drafts make it faster.
    """
    assert training.PROGRAM[-2:] == ("-m", distill.__module__.removesuffix(".__main__"))
    program = (*training.PROGRAM[:2], *training.PROGRAM[5:]) if alone else fake_program(tmp_path, "wait")
    monkeypatch.setattr(training, "PROGRAM", program)
    for name, value in {"PAGE": 1024, "STEP": 128, "RATE": 0.05, "TOKENS_PER_MINUTE": 34}.items():
        monkeypatch.setattr(learn, name, value)
    Runs(monkeypatch, helpful)
    old = session.harness.pair
    for line in ("/length 24", f"/learn 60 {folders / 'prompts.txt'}"):
        assert session.handle(line) is Verdict.DONE
    assert "learning from 7 prompts for about 60 min" in (shown := view.take()[1]) and "5 prompts are kept" in shown
    one = session.harness.state.training
    assert one is not None and (alone or distill([*one._process.command[len(program) :]]) == 0)
    assert session.handle("/learn wait") is Verdict.DONE
    report, _ = view.take()
    row = records_of(tmp_path / "records.jsonl")[-1]["findings"][-1]
    assert row["verdict"] == "faster" and row["interval"][0] > 1 and row["acceptance_rate"] > 0.2, report
    assert "The new drafter is faster: " in report and "the old one (95 % interval" in report
    new, folder = session.harness.pair, home / "learned-1"
    assert new.drafter_name == "learned-1 (EAGLE-3)" and new.target is old.target and list(home.iterdir()) == [folder]
    assert session.handle("Tell me about tea") is Verdict.DONE and session.handle("/undo") is Verdict.DONE
    assert session.harness.pair is old and "undone: target + damaged" in view.take()[1]
    assert session.handle(f"/load drafter={folder}") is Verdict.DONE, "it is an ordinary drafter"
    stored = sum(path.stat().st_size for path in folder.iterdir())
    assert stored < 1.5 * sum(path.stat().st_size for path in (folders / "damaged").iterdir()), "and stores as little"


def fake_runs(patch: pytest.MonkeyPatch, factor: float, **options: Any) -> Runs:
    """Runs of constant seconds, times a factor for the new drafter. Their drafts count as useful."""
    patch.setattr(speed_claims, "NO_GAIN", 0.0)

    def seconds(strategy: Strategy, step: Step) -> float:
        return STEP * (factor if strategy.name == learn.NEW else 1)

    return Runs(patch, seconds, **options)


@pytest.mark.parametrize(("factor", "verdict"), [(0.8, "faster"), (1.25, "slower")])
def test_only_a_faster_drafter_is_used(
    factor: float, verdict: str, session: ReplSession, folders: Path, home: Path, view: Screen, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fake_runs(patch, factor, noise=0.02)
        trained(session, folders, tmp_path)
        old, helpers = session.harness.pair, len(session.harness.pair.engine._helpers)
        assert session.handle("/learn wait") is Verdict.DONE
    used = session.harness.pair is not old
    assert used is (verdict == "faster") and len(old.engine._helpers) == helpers + used
    report = view.take()[0]
    assert f"The new drafter is {verdict}: " in report and ("/undo goes back" in report) is used
    assert (home / "learned-1" / "README.md").is_file() and "learned-1, for --drafter and /load" in report
    assert session.harness.state.training is None and session.handle("/learn wait") is Verdict.FAILED


def test_noise_is_not_used(
    session: ReplSession, folders: Path, view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter with the same weights, in five races whose runs vary by a tenth."""
    used, old, state = 0, session.harness.pair, session.harness.state
    trained(session, folders, tmp_path)
    same, runs = state.training, fake_runs(monkeypatch, 1.0, noise=0.1, passes=4)
    for number in range(5):
        state.training, runs._random = same, np.random.default_rng(number)
        assert session.handle("/learn wait") is Verdict.DONE
        if session.harness.pair is not old:
            used += 1
            session.handle("/undo")
    assert used <= 1 and "not distinguishable" in view.take()[0]


def test_undo_goes_back_through_settings_and_drafters(session: ReplSession, folders: Path, tmp_path: Path) -> None:
    assert session.handle("/length 5") is Verdict.DONE
    old = session.harness.pair
    with pytest.MonkeyPatch.context() as patch:
        fake_runs(patch, 0.8)
        trained(session, folders, tmp_path)
        assert session.handle("/learn wait") is Verdict.DONE
    new = session.harness.pair
    assert session.handle("/length 6") is Verdict.DONE and new is not old
    steps = []
    for _ in range(3):
        assert session.handle("/undo") is Verdict.DONE
        steps.append((session.harness.pair is new, session.settings.length))
    assert steps == [(True, 5), (False, 5), (False, 8)]
    assert session.harness.pair is old and session.handle("Hello") is Verdict.DONE


def test_the_next_prompt_races_a_finished_training_once(
    session: ReplSession, folders: Path, view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the race and the prompt; then only /learn wait races."""
    runs = fake_runs(monkeypatch, 0.8)
    trained(session, folders, tmp_path)
    old = session.harness.pair
    assert session.handle("/gamma 3") is Verdict.DONE and not runs.made, "a command does not wait for a race"
    runs.stop_after = lambda: len(runs.made) > 4
    assert session.handle("Hello") is Verdict.INTERRUPTED
    assert session.harness.pair is old and len(old.engine._helpers) == 1 and len(session.harness.state.prompts) == 0
    assert "The race was not finished" in view.take()[0]
    runs.stop_after = lambda: False
    made = len(runs.made)
    assert session.handle("Hello") is Verdict.DONE and len(runs.made) == made and session.harness.pair is old
    assert session.handle("/learn wait") is Verdict.DONE and session.harness.pair is not old


def test_the_next_prompt_uses_the_new_drafter_at_once(session: ReplSession, folders: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fake_runs(patch, 0.8)
        trained(session, folders, tmp_path)
        assert session.handle("Hello") is Verdict.DONE
    assert session.harness.state.last is not None
    assert session.harness.state.last.job.pair.drafter_name == "learned-1 (EAGLE-3)"


def test_a_full_disk_does_not_cost_the_new_drafter(
    session: ReplSession, folders: Path, view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: RecordFile, rows: object) -> None:
        raise UserError("no space left")

    trained(session, folders, tmp_path)
    old, _ = session.harness.pair, fake_runs(monkeypatch, 0.8)
    monkeypatch.setattr(RecordFile, "append", full)
    assert session.handle("/learn wait") is Verdict.FAILED
    shown, messages = view.take()
    assert "It drafts from now on" in shown and "no space left" in messages
    assert session.harness.pair is not old and session.harness.state.training is None


def test_a_training_that_fails_costs_no_prompt(
    session: ReplSession, folders: Path, home: Path, view: Screen, tmp_path: Path
) -> None:
    trained(session, folders, tmp_path, "fail")
    assert session.handle("Hello") is Verdict.DONE
    shown, messages = view.take()
    assert "no memory is left" in messages and "Target only" in shown and "Traceback" not in messages
    assert session.harness.state.training is None and not list(home.iterdir())


def test_a_training_is_stopped_while_a_line_runs(folders: Path, home: Path, view: Screen, tmp_path: Path) -> None:
    grown: list[int] = []

    def watched(job: Any) -> Any:
        before = ticks(home)
        time.sleep(0.3)
        grown.append(ticks(home) - before)
        yield from target.steps(job)

    target = next(row for row in STRATEGIES if row.is_baseline)
    table = (*(row for row in STRATEGIES if row is not target), replace(target, steps=watched))
    pair = load_pair(PairRequest(str(folders / "target"), str(folders / "damaged"), device="cpu"), lambda line: None)
    session = open_session(view, pair, strategies=table)
    trained(session, folders, tmp_path, "forever")
    end = time.monotonic() + 60
    while not ticks(home) and time.monotonic() < end:
        time.sleep(0.01)
    for line in ("/speculative off", "/ngram off", "Hello", "Hello again"):
        assert session.handle(line) is Verdict.DONE
    before = ticks(home)
    while ticks(home) == before and time.monotonic() < end:
        time.sleep(0.01)
    assert grown == [0, 0] and ticks(home) > before, "it goes on between the lines"
    assert session.handle("/learn") is Verdict.DONE and "generating: 10 of 20 tokens" in view.take()[1]
    assert "learning for" in session.status()
    assert session.handle(f"/learn 1 {folders / 'prompts.txt'}") is Verdict.FAILED, "one at a time"
    assert session.handle("/learn stop") is Verdict.DONE and not list(home.iterdir())
    session.close()


@pytest.mark.parametrize("line", ["/load target={0}/target drafter={0}/damaged", "close"])
def test_a_training_ends_with_its_pair(
    line: str, session: ReplSession, folders: Path, home: Path, tmp_path: Path
) -> None:
    trained(session, folders, tmp_path, "forever")
    if line == "close":
        session.close()
    else:
        assert session.handle(line.format(folders)) is Verdict.DONE
    assert session.harness.state.training is None and not list(home.iterdir())


def test_prompts_of_the_session_are_enough_from_ten_on(
    session: ReplSession, folders: Path, home: Path, view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "PROGRAM", fake_program(tmp_path, "forever"))
    session.harness.state.prompts += [f"Tell me about {word}" for word in WORDS[:9]] + ["Tell me about apple"]
    assert session.handle("/learn") is Verdict.FAILED
    assert "1 more different prompt is needed: there are 9, and 10 are the fewest" in view.take()[1]
    session.harness.state.prompts.append("Tell me about tea")
    assert session.handle("/learn 2.5") is Verdict.DONE
    one = session.harness.state.training
    assert one is not None and len(one.apart) == 5
    learned = next(home.glob(".training-*/prompts.jsonl")).read_text()
    assert learned.count("\n") == 5 and not any(prompt.text in learned for prompt in one.apart)


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        (["/learn wait"], "nothing is being learned"),
        (["/learn stop"], "nothing is being learned"),
        (["/learn 0 {file}"], "above 0, at most 1440"),
        (["/learn 5x {file}"], "'5x' is not a number"),
        (["/learn ./nowhere"], "nowhere"),
        (["/chat off", "/learn {file}"], "/chat is off"),
    ],
)
def test_what_cannot_be_learned_is_refused(
    lines: list[str], part: str, session: ReplSession, folders: Path, home: Path, view: Screen
) -> None:
    verdicts = [session.handle(line.format(file=folders / "prompts.txt")) for line in lines]
    assert verdicts[-1] is Verdict.FAILED and part in view.take()[1] and not home.exists()


@pytest.mark.parametrize("what", ["memory", "space"])
def test_the_budget_is_checked_before_anything_starts(
    what: str, session: ReplSession, folders: Path, home: Path, view: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "memory":
        monkeypatch.setattr(learn, "free_bytes", lambda device: 900_000_000)
    else:
        monkeypatch.setattr(learn.shutil, "disk_usage", lambda path: mock.Mock(free=1000))
    assert session.handle(f"/learn {folders / 'prompts.txt'}") is Verdict.FAILED
    message = view.take()[1]
    assert f"of {what}" in message and "are free" in message and not home.exists()


def test_other_drafters_do_not_learn(view: Screen, folders: Path, home: Path) -> None:
    session = open_session(view, table_pair())
    assert session.handle(f"/learn {folders / 'prompts.txt'}") is Verdict.FAILED
    assert "only drafters of the kind EAGLE-3 learn" in view.take()[1] and not home.exists()


def test_the_engine_computes_the_new_drafter_too(session: ReplSession, folders: Path, tmp_path: Path) -> None:
    """It must not lose the race because its layers are slower, and it learns with an engine in place, too."""
    assert session.handle("/engine invariant") is Verdict.DONE
    with pytest.MonkeyPatch.context() as patch:
        fake_runs(patch, 0.8)
        trained(session, folders, tmp_path)
        assert session.handle("/learn wait") is Verdict.DONE
    drafter: Any = session.harness.pair.drafter
    assert session.harness.pair.drafter_name == "learned-1 (EAGLE-3)" and isinstance(drafter.compiled, CompiledDrafter)
    assert session.handle("/engine plain") is Verdict.DONE and drafter.compiled is None
    assert session.handle("Hello") is Verdict.DONE


def test_ngrams_are_learned_from_a_folder(view: Screen, tmp_path: Path) -> None:
    session = open_session(view)
    notes = tmp_path / "notes"
    (notes / "more").mkdir(parents=True)
    (notes / ".git").mkdir()
    (notes / "a.txt").write_text("one two three")
    (notes / "more" / "b.py").write_text("print(1)")
    (notes / ".git" / "c.txt").write_text("hidden")
    (notes / "d.bin").write_bytes(b"\xff\xfe\x00")
    assert session.handle(f"/learn ngram {notes}") is Verdict.DONE
    assert "from 2 of 3 files; /ngram keep was turned on" in view.take()[1]
    storage, tokenizer = session.harness.state.storage, session.harness.pair.tokenizer
    expected = session.harness.new_storage(session.settings)
    for text in ("one two three", "print(1)"):
        expected.initialize(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert list(storage.contexts()) == list(expected.contexts()) and not session.settings.reset_in_between
    assert session.handle(f"/ngram save {tmp_path / 'n.ngrams'}") is Verdict.DONE
    assert len(load_storage(tmp_path / "n.ngrams", SIZE, 1000)[0]) == len(storage) > 0
    assert session.handle("one two") is Verdict.DONE and session.harness.state.storage is storage


def test_ngrams_of_one_file_and_a_full_storage(view: Screen, tmp_path: Path) -> None:
    session = open_session(view)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"a text about {name * 9}")
    assert session.handle(f"/learn ngram {tmp_path / 'a.txt'}") is Verdict.DONE
    assert "from 1 of 1 file;" in view.take()[1]
    for line in ("/ngram limit 20", f"/learn ngram {tmp_path}"):
        assert session.handle(line) is Verdict.DONE
    assert "20 n-grams from 1 of 3 files; the storage is full, /ngram limit allows more" in view.take()[1]


@pytest.mark.parametrize(("name", "part"), [("", "for example"), ("none", "none"), ("d.bin", "not UTF-8"), ("e", "no")])
def test_ngrams_that_cannot_be_learned(name: str, part: str, view: Screen, tmp_path: Path) -> None:
    (tmp_path / "d.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "e").mkdir()
    session = open_session(view)
    assert session.handle(f"/learn ngram {tmp_path / name if name else ''}") is Verdict.FAILED
    assert part in view.take()[1] and not session.harness.state.storage
