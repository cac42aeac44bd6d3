"""/load and /pairs: other models in the same session, or the old ones where that fails."""

import weakref

import pytest
import torch
from fakes import Screen, records_of, screen, tiny_pair, workbench
from shelf import fill_shelf
from tiny import save_folder, tiny_llama, tiny_tokenizer

from utils.config.settings import setting_fields, shown
from utils.pairs.load_pair import PairRequest, load_pair
from utils.repl.repl_session import Workbench
from utils.repl.runner import Verdict


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    root = tmp_path_factory.mktemp("shelf")
    save_folder(
        root / "short", tiny_llama(2, vocab_size=280, max_position_embeddings=20), tiny_tokenizer(280, chat=False)
    )
    return fill_shelf(root)


def opened(view: Screen, records=None) -> Workbench:
    return workbench(view, tiny_pair(), records, load=load_pair)


def test_another_pair_is_loaded_and_used(shelf, tmp_path):
    view, file = screen(), tmp_path / "r.jsonl"
    bench = opened(view, file)
    for line in ("/gamma 3", "/length 5", f"/load target={shelf / 'target'} drafter={shelf / 'drafter'}", "hello"):
        assert bench.handle(line) is Verdict.DONE, view.take()
    record = records_of(file)[-1]
    assert record["models"]["target"] == "target" and record["models"]["drafter"] == "drafter"
    assert (record["settings"]["gamma"], record["settings"]["length"]) == (3, 5)
    messages = view.take()[1]
    assert "loading target" in messages and "engine: " in messages and "warming up target" in messages


def test_what_is_not_named_stays_and_a_new_target_brings_its_own_drafter(shelf):
    view = screen()
    bench = opened(view)
    shown = [("target", "drafter", "none")]
    for line in (
        f"target={shelf / 'target'} drafter={shelf / 'drafter'} quantize=int8",
        "drafter=layers:2",
        f"target={shelf / 'single'}",
    ):
        assert bench.handle(f"/load {line}") is Verdict.DONE, view.take()
        request = bench._bench.pair.request
        shown.append((request.target.rsplit("/")[-1], (request.drafter or "").rsplit("/")[-1], request.quantize))
    assert shown[1:] == [("target", "drafter", "int8"), ("target", "layers:2", "int8"), ("single", "", "int8")]


def test_settings_that_no_longer_fit_are_bent(shelf):
    """A cut of the old target, more tokens than the new one has, a length beyond the new one's context, chat without a template."""
    view = screen()
    bench = opened(view)
    for line in (
        "/drafter_kind lookup layers:1",
        "/length 60",
        "/processor topk 1 290",
        "/seed 5",
        f"/load target={shelf / 'short'}",
    ):
        assert bench.handle(line) is Verdict.DONE
    assert (bench.settings.drafter_kind, bench.settings.length, bench.settings.chat) == (("lookup",), 20, False)
    assert shown(bench.settings, setting_fields()["processor"]) == "greedy" and bench.settings.seed == 5
    assert "no chat template" in view.take()[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "/load target=FOLDER"),
        ("target=./nowhere", "does not exist"),
        ("target={shelf}/bare", "has no tokenizer files"),
        ("target={shelf}/target drafter={shelf}/t5", "one of them is an encoder-decoder model"),
        ("target={shelf}/target drafter=layers:99", "layers"),
        ("targt=x", "Did you mean target?"),
        ("quantize=int9", "Did you mean int8?"),
        ("device=tpu", "is not a device"),
        ("smollm3", "Did you mean smollm2?"),
        ("target=", "needs a value"),
        ("target='x", "quotation mark"),
    ],
)
def test_a_load_that_fails_leaves_the_old_pair_as_it_was(shelf, tmp_path, words, said):
    view, file = screen(), tmp_path / "r.jsonl"
    bench = opened(view, file)
    before = bench._bench.pair
    assert bench.handle(f"/load {words.format(shelf=shelf)}") is Verdict.FAILED
    message = view.take()[1]
    assert said in message and "Traceback" not in message
    assert bench._bench.pair is before and bench.handle("hello") is Verdict.DONE
    assert records_of(file)[-1]["models"]["target"] == "tiny-target"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_breaks_off_behind_the_loading_leaves_it_too(shelf, monkeypatch, error):
    """While the engine is prepared, or the models are warmed up."""
    view = screen()
    bench = opened(view)
    before, settings, threads = bench._bench, bench.settings, torch.get_num_threads()

    def broken(self):
        torch.set_num_threads(threads + 1)  # as an engine that is prepared may
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Workbench, "warm_up", broken)
        assert bench.handle(f"/load target={shelf / 'target'}") in (Verdict.INTERRUPTED, Verdict.FAILED)
    assert bench._bench is before and bench.settings == settings and torch.get_num_threads() == threads
    assert bench.handle("hello") is Verdict.DONE


def test_known_pairs_are_listed_and_the_loaded_one_is_marked():
    view = screen()
    bench = opened(view)
    assert bench.handle("/pairs") is Verdict.DONE
    shown = view.take()[0]
    assert "smollm2" in shown and "Qwen/Qwen3-4B + Qwen/Qwen3-0.6B" in shown and "loaded" not in shown


def test_the_old_pair_is_let_go(shelf):
    view = screen()
    pair = load_pair(PairRequest(str(shelf / "target"), str(shelf / "drafter"), device="cpu"), lambda line: None)
    old = [weakref.ref(part) for part in (pair.target, pair.drafter)]
    bench = workbench(view, pair, load=load_pair)
    del pair
    for line in ("hello", "/debug on", "hello", f"/load target={shelf / 'single'}"):
        assert bench.handle(line) is Verdict.DONE
    assert [part() for part in old] == [None, None]
    assert bench.handle("/undo") is Verdict.FAILED, "settings of another pair, its costs among them, do not come back"
