"""/pair: whether a drafter fits its target, with the reason; and that near misses cost acceptance, never the text."""

import pytest
from fakes import screen, tiny_pair, workbench
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_t5, tiny_tokenizer

from utils.pairs.compatibility import fit_of
from utils.pairs.load_pair import load_pair
from utils.repl.runner import Verdict


def found(target=None, drafter=None, own=None, ours=None):
    ours = ours or tiny_tokenizer()
    return fit_of(target or tiny_llama(vocab_size=300), ours, drafter or tiny_llama(1, vocab_size=300), own or ours)


def value(fit, what):
    return next(row for row in fit.rows if row.what == what)


def test_a_good_pair():
    fit = found(drafter=tiny_llama(1, vocab_size=300, num_hidden_layers=1, intermediate_size=16))
    assert (fit.verdict, fit.reason) == ("fine", "")
    assert value(fit, "ids that mean the same").value == "300 of 300"
    assert value(fit, "padding rows").value == "0 and 0"
    assert (
        value(fit, "end of text").remark
        == value(fit, "special tokens").remark
        == value(fit, "chat template").remark
        == "the same"
    )
    assert not [row for row in fit.rows if row.warns and row.what != "size"]


def test_padding_is_fine_and_counted():
    fit = found(drafter=tiny_llama(1, vocab_size=320), ours=tiny_tokenizer(290))
    assert fit.verdict == "fine with 20 padding rows" and value(fit, "padding rows").value == "10 and 30"


@pytest.mark.parametrize(
    ("own", "verdict", "same"),
    [
        (tiny_tokenizer(shift=1), "different tokenizers", 44),
        (tiny_tokenizer(299), "fine", 299),
        (tiny_tokenizer(290), "different tokenizers", 290),
    ],
)
def test_tokenizers_are_compared_id_by_id(own, verdict, same):
    fit = found(own=own)
    assert fit.verdict == verdict and value(fit, "ids that mean the same").value == f"{same} of 300"
    assert not fit.reason and fit.translated == (verdict != "fine")


def test_what_else_is_worth_saying():
    doubled = tiny_tokenizer()
    doubled.chat_template = (
        "{{ bos_token + bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    fit = found(
        drafter=tiny_llama(1, vocab_size=300, max_position_embeddings=64), own=tiny_tokenizer(chat=False), ours=doubled
    )
    assert value(fit, "first token").warns and "doubles" in value(fit, "first token").remark
    assert value(fit, "context").warns and "64 tokens" in value(fit, "context").value
    assert value(fit, "size").warns and value(fit, "size").value.endswith("1 to 1.00")
    assert value(fit, "chat template").remark == "the target's is used"
    assert len(fit.notes()) == 4


def test_an_end_of_another_name_is_shown():
    drafter = tiny_llama(1, vocab_size=300)
    drafter.generation_config.eos_token_id = [256, 258]
    assert value(found(drafter=drafter), "end of text").remark.startswith("they differ")


def test_a_near_miss_is_loaded_and_changes_no_text(shelf):
    """One token of 300 means something else: it is only ever rejected."""
    view = screen()
    bench = workbench(view, tiny_pair(), load=load_pair)
    assert bench.handle(f"/load target={shelf / 'target'} drafter={shelf / 'cousin'}") is Verdict.DONE
    assert "pair: fine" in view.take()[1]
    assert bench.handle("hello") is Verdict.DONE and "differs" not in view.take()[0]
    assert bench.handle("/pair") is Verdict.DONE
    shown = view.take()[0]
    assert "verdict" in shown and "299 of 300" in shown


def test_drafts_of_another_tokenizer_are_translated_and_that_is_said(shelf):
    pair = load(shelf / "target", shelf / "stranger")
    assert pair.drafter_tokenizer is not None and pair.notes[0] == "pair: different tokenizers"
    assert any("translated back and forth" in note for note in pair.notes)
    assert load(shelf / "target", shelf / "cousin").drafter_tokenizer is None


def test_encoders_of_another_tokenizer_are_refused(tmp_path):
    save_folder(tmp_path / "a", tiny_t5(vocab_size=300), tiny_tokenizer())
    save_folder(tmp_path / "b", tiny_t5(vocab_size=300), tiny_tokenizer(shift=1))
    assert "its tokenizer is another one" in refusal(tmp_path / "a", tmp_path / "b")


def test_drafters_of_the_targets_own_need_no_check(shelf, tmp_path):
    assert load(shelf / "target", "layers:2").fit.verdict == "fine"
    save_folder(tmp_path / "alone", tiny_llama(vocab_size=300, num_hidden_layers=1), tiny_tokenizer())
    assert load(tmp_path / "alone").fit.verdict == "no drafter"
