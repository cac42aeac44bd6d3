"""/pair: whether a drafter suits its target and why. A slightly unsuitable drafter costs acceptance, never the text."""

from pathlib import Path

import pytest
from fakes import open_session, screen, tiny_pair
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_mamba, tiny_t5, tiny_tokenizer

from utils.pairs.load_pair import load_pair
from utils.pairs.pair import (
    DIFFERENT_TOKENIZERS,
    NEEDS_CACHE_OFF,
    Compatibility,
    PairFinding,
    compare_models,
)
from utils.repl.repl_session import Verdict


def compared(drafter=None, drafter_tokenizer=None, tokenizer=None) -> Compatibility:
    tokenizer = tokenizer or tiny_tokenizer()
    drafter = drafter or tiny_llama(1, vocab_size=300)
    return compare_models(tiny_llama(vocab_size=300), tokenizer, drafter, drafter_tokenizer or tokenizer)


def finding(result: Compatibility, what: str) -> PairFinding:
    return next(found for found in result.findings if found.what == what)


def test_a_good_pair() -> None:
    result = compared(tiny_llama(1, vocab_size=300, num_hidden_layers=1, intermediate_size=16))
    assert result.verdict == "fine"
    assert finding(result, "ids that mean the same").value == "300 of 300"
    assert not [found for found in result.findings if found.warns and found.what != "size"]


def test_padding_rows_are_fine_and_counted() -> None:
    result = compared(tiny_llama(1, vocab_size=320), tokenizer=tiny_tokenizer(290))
    assert "20" in result.verdict
    assert not result.needs_translation


@pytest.mark.parametrize(
    ("drafter_tokenizer", "verdict", "same"),
    [
        (tiny_tokenizer(shift=1), DIFFERENT_TOKENIZERS, 44),
        (tiny_tokenizer(299), "fine", 299),
        (tiny_tokenizer(290), DIFFERENT_TOKENIZERS, 290),
    ],
)
def test_tokenizers_are_compared_id_by_id(drafter_tokenizer, verdict, same) -> None:
    result = compared(drafter_tokenizer=drafter_tokenizer)
    assert result.verdict == verdict and finding(result, "ids that mean the same").value == f"{same} of 300"
    assert result.needs_translation == (verdict != "fine")


def test_other_differences_that_cost_drafts_are_warnings() -> None:
    doubled = tiny_tokenizer()
    doubled.chat_template = (
        "{{ bos_token + bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    short = tiny_llama(1, vocab_size=300, max_position_embeddings=64)
    result = compared(short, tiny_tokenizer(chat=False), doubled)
    assert finding(result, "first token").warns and finding(result, "first token").value.endswith("twice")
    assert finding(result, "context").warns and "64 tokens" in finding(result, "context").value
    assert finding(result, "size").warns and finding(result, "size").value.endswith("1 to 1.00")
    assert len(result.notes()) == 4


def test_a_pair_that_needs_the_cache_off_is_not_fine_and_says_why_once(tmp_path: Path) -> None:
    """Mamba computes several tokens after its state differently from single ones."""
    for name, model in (("mamba", tiny_mamba(vocab_size=300)), ("llama", tiny_llama(1, vocab_size=300))):
        save_folder(tmp_path / name, model, tiny_tokenizer(chat=False))
    pair = load(tmp_path / "mamba", tmp_path / "llama")
    assert pair.compatibility.verdict == NEEDS_CACHE_OFF and "pair: fine" not in pair.notes
    assert load(tmp_path / "llama", tmp_path / "mamba").compatibility.verdict == NEEDS_CACHE_OFF
    view = screen()
    session = open_session(view, pair)
    view.take()
    assert session.handle("/length 4") is Verdict.DONE and session.handle("Hello") is Verdict.FAILED
    messages = view.take()[1]
    assert messages.count("turn the cache off") == 1 and messages.count("same reason as speculative") == 1
    assert session.handle("/cache off") is session.handle("Hello") is Verdict.DONE


def test_a_slightly_different_tokenizer_changes_no_text(shelf: Path) -> None:
    """One of 300 ids means a different token, so drafts with it are rejected."""
    view = screen()
    session = open_session(view, tiny_pair(), load=load_pair)
    assert session.handle(f"/load target={shelf / 'target'} drafter={shelf / 'cousin'}") is Verdict.DONE
    assert "pair: fine" in view.take()[1]
    assert session.handle("/length 8") is session.handle("hello") is Verdict.DONE and "differs" not in view.take()[0]
    assert session.handle("/pair") is Verdict.DONE
    shown = view.take()[0]
    assert "verdict" in shown and "299 of 300" in shown


def test_drafts_of_a_different_tokenizer_are_translated_and_the_user_is_told(shelf: Path) -> None:
    pair = load(shelf / "target", shelf / "stranger")
    assert pair.drafter_tokenizer is not None and pair.compatibility.needs_translation
    assert finding(pair.compatibility, "drafts").warns and set(pair.compatibility.notes()) <= set(pair.notes)
    assert load(shelf / "target", shelf / "cousin").drafter_tokenizer is None


def test_encoder_decoders_with_different_tokenizers_are_refused(tmp_path: Path) -> None:
    save_folder(tmp_path / "a", tiny_t5(vocab_size=300), tiny_tokenizer())
    save_folder(tmp_path / "b", tiny_t5(vocab_size=300), tiny_tokenizer(shift=1))
    message = refusal(tmp_path / "a", tmp_path / "b")
    assert "'b'" in message and "44 of 300" in message


def test_layers_of_the_target_always_suit_it(shelf: Path, tmp_path: Path) -> None:
    assert load(shelf / "target", "layers:2").compatibility.verdict == "fine"
    save_folder(tmp_path / "alone", tiny_llama(vocab_size=300, num_hidden_layers=1), tiny_tokenizer())
    assert load(tmp_path / "alone").compatibility.verdict == "no drafter"
