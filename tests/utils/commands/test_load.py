"""/load and /pair list: other models in the same session, or the old ones if that fails."""

import gc
import weakref

import pytest
import torch
from fakes import Screen, open_session, records_of, screen, table_pair, tiny_pair
from tiny import save_folder, tiny_llama, tiny_tokenizer

from utils.config.settings import setting_fields
from utils.pairs.load_pair import load_pair
from utils.pairs.request import PAIRS, PairRequest, parse_request
from utils.repl.loaded_pair import NO_TEMPLATE, TEMPLATE, LoadedPair
from utils.repl.repl_session import ReplSession, Verdict


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A target with a short context and no chat template."""
    model = tiny_llama(2, vocab_size=280, max_position_embeddings=20, num_hidden_layers=1)
    return save_folder(tmp_path_factory.mktemp("short"), model, tiny_tokenizer(280, chat=False))


def opened(view: Screen, records=None) -> ReplSession:
    return open_session(view, table_pair(), records, load=load_pair)


def test_another_pair_is_loaded_and_used(shelf, tmp_path):
    view, file = screen(), tmp_path / "r.jsonl"
    session = opened(view, file)
    for line in ("/gamma 3", "/length 5", f"/load target={shelf / 'target'} drafter={shelf / 'drafter'}", "hello"):
        assert session.handle(line) is Verdict.DONE, view.take()
    record = records_of(file)[-1]
    assert record["models"]["target"] == "target" and record["models"]["drafter"] == "drafter"
    assert (record["settings"]["gamma"], record["settings"]["length"]) == (3, 5)
    messages = view.take()[1]
    assert "loading target" in messages and "engine: " in messages and "warming up" in messages


def test_what_is_not_named_stays_and_a_new_target_drops_the_drafter(shelf):
    view = screen()
    session = opened(view)
    shown = [("target", "drafter", "none")]
    for line in (
        f"target={shelf / 'target'} drafter={shelf / 'drafter'} quantize=int8",
        "drafter=layers:2",
        f"target={shelf / 'single'}",
    ):
        assert session.handle(f"/load {line}") is Verdict.DONE, view.take()
        request = session.harness.pair.request
        shown.append((request.target.rsplit("/")[-1], (request.drafter or "").rsplit("/")[-1], request.quantize))
    assert shown[1:] == [("target", "drafter", "int8"), ("target", "layers:2", "int8"), ("single", "", "int8")]


def test_settings_that_no_longer_fit_are_reset(short):
    """Layers of the old target, a top-k above the new vocabulary, too long a length, chat without a template."""
    view = screen()
    session = open_session(view, tiny_pair(num_hidden_layers=2), load=load_pair)
    for line in (
        "/drafter_kind lookup layers:1",
        "/length 60",
        "/processor topk 1 290",
        "/seed 5",
        f"/load target={short}",
    ):
        assert session.handle(line) is Verdict.DONE
    assert (session.settings.drafter_kind, session.settings.length, session.settings.uses_chat) == (
        ("lookup",),
        20,
        False,
    )
    assert setting_fields()["processor"].show(session.settings) == "greedy" and session.settings.seed == 5
    assert NO_TEMPLATE in view.take()[1]


def test_chat_is_decided_anew_for_each_tokenizer_unless_the_user_turned_it_off(shelf, short, tmp_path):
    view, file = screen(), tmp_path / "r.jsonl"
    session = opened(view, file)
    with_template, without = (f"/load target={folder}" for folder in (shelf / "single", short))
    for line, chats in ((without, False), (with_template, True)):
        for typed in (line, "/length 2", "hello"):
            assert session.handle(typed) is Verdict.DONE, view.take()
        assert records_of(file)[-1]["settings"]["chat"] is chats
    messages = view.take()[1]
    assert NO_TEMPLATE in messages and TEMPLATE in messages
    for line in (without, "/chat off", with_template, "hello"):
        assert session.handle(line) is Verdict.DONE
    assert records_of(file)[-1]["settings"]["chat"] is False
    assert TEMPLATE not in view.take()[1]


@pytest.mark.parametrize(
    "line", ["smollm2", "smollm2 drafter=layers:2", "smollm2 quantize=int4", "quantize=int4 smollm2"]
)
def test_a_pair_by_name_has_its_own_options(line):
    before = PairRequest("here", "there", "cpu", "bfloat16", "bnb-int8", "int8", engine_weights="int8")
    request = parse_request(line, before, PAIRS)
    pair = PAIRS["smollm2"]
    drafter = "layers:2" if "layers" in line else pair.drafter
    assert request == PairRequest(pair.target, drafter, quantize="int4" if "int4" in line else "none")


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("", "target=FOLDER"),
        ("target=./nowhere", "nowhere"),
        ("target={shelf}/bare", "tokenizer"),
        ("target={shelf}/target drafter={shelf}/t5", "encoder-decoder"),
        ("target={shelf}/target drafter=layers:99", "layers"),
        ("targt=x", "target?"),
        ("quantize=int9", "int8?"),
        ("device=tpu", "tpu"),
        ("smollm3", "smollm2?"),
        ("target=", "target="),
        ("target='x", "quotation mark"),
    ],
)
def test_a_load_that_fails_leaves_the_old_pair_as_it_was(shelf, tmp_path, argument, part):
    view, file = screen(), tmp_path / "r.jsonl"
    session = opened(view, file)
    before = session.harness.pair
    assert session.handle(f"/load {argument.format(shelf=shelf)}") is Verdict.FAILED
    message = view.take()[1]
    assert part in message and "Traceback" not in message
    if "{shelf}" in argument:  # found wrong only while loading
        assert "Still loaded: tiny-target + tiny-drafter" in message
    assert session.harness.pair is before and session.handle("hello") is Verdict.DONE
    assert records_of(file)[-1]["models"]["target"] == "tiny-target"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_failure_after_loading_leaves_the_old_pair_too(shelf, monkeypatch, error):
    """While the engine is started or the models are warmed up."""
    view = screen()
    session = opened(view)
    before, settings, threads = session.harness, session.settings, torch.get_num_threads()

    def broken(pair):
        torch.set_num_threads(threads + 1)  # as starting an engine may
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(LoadedPair, "warm_up", broken)
        assert session.handle(f"/load target={shelf / 'target'}") in (Verdict.INTERRUPTED, Verdict.FAILED)
    assert session.harness is before and session.settings == settings and torch.get_num_threads() == threads
    assert session.handle("hello") is Verdict.DONE


def test_known_pairs_are_listed():
    view = screen()
    session = opened(view)
    assert session.handle("/pair list") is Verdict.DONE
    shown = view.take()[0]
    assert "smollm2" in shown and "Qwen/Qwen3-4B + Qwen/Qwen3-0.6B" in shown and "loaded" not in shown


def test_the_old_pair_is_freed(shelf):
    view = screen()
    pair = load_pair(PairRequest(str(shelf / "target"), str(shelf / "drafter"), device="cpu"), lambda line: None)
    old = [weakref.ref(part) for part in (pair.target, pair.drafter)]
    session = open_session(view, pair, load=load_pair)
    del pair
    for line in ("hello", "/debug on", "hello", f"/load target={shelf / 'single'}"):
        assert session.handle(line) is Verdict.DONE
    gc.collect()  # as the session does outside tests
    assert [part() for part in old] == [None, None]
    assert session.handle("/undo") is Verdict.FAILED, "settings of the old pair do not come back"
