"""Drafters with another tokenizer: what they say is the target's text or nothing, and a perfect one is always believed."""

import copy

import pytest
import torch
from fakes import open_session, records_of, screen, tiny_pair
from tiny import tiny_llama, tiny_sliding, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sampling.drafters.cross_tokenizer import CrossTokenizerDrafter, Translation
from utils.decode.model_session import ModelSession
from utils.repl.runner import Verdict

WORDS = 300


def word_tokenizer(shift=0):
    """A word a token: any ids are a text, and that text is those ids."""
    vocab = {"<end>": 0} | {f"w{index}": 1 + (index + shift) % (WORDS - 1) for index in range(WORDS - 1)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<end>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", unk_token="<end>")


def renamed(model, shift):
    """The same model, in the ids of a tokenizer that is shifted."""
    twin = copy.deepcopy(model)
    places = torch.tensor([0, *(1 + (index + shift) % (WORDS - 1) for index in range(WORDS - 1))])
    with torch.no_grad():
        for ours, theirs in ((model.model.embed_tokens, twin.model.embed_tokens), (model.lm_head, twin.lm_head)):
            theirs.weight[places] = ours.weight
    return twin


def pair_of(drafter, ours, theirs, target=None):
    pair = tiny_pair(chat=False)
    pair.target = target or pair.target
    pair.drafter, pair.tokenizer, pair.drafter_tokenizer = drafter, ours, theirs
    pair.end_ids = frozenset()
    pair.engine = type(pair.engine)([pair.target, pair.drafter])
    return pair


def runs(pair, folder, *lines):
    """What every strategy made of the last line, by name; each text must be the target's."""
    session = open_session(screen(), pair, folder / "r.jsonl")
    for line in ("/length 20", "/gamma 4", *lines):
        assert session.handle(line) is Verdict.DONE, line
    found = {record["strategy"]: record for record in records_of(folder / "r.jsonl")}
    assert all(record["same_as_target"] for record in found.values())
    return found


@pytest.mark.parametrize("cache", ["on", "off"])
def test_a_perfect_drafter_in_other_words_is_always_believed(tmp_path, cache):
    target = tiny_llama(0, vocab_size=WORDS)
    pair = pair_of(renamed(target, 7), word_tokenizer(), word_tokenizer(7), target)
    found = runs(pair, tmp_path, f"/cache {cache}", "/ngram off", "w5 w9 w250 w3")
    assert found["speculative"]["acceptance_rate"] == 1.0 and found["speculative"]["drafted"] > 10


@pytest.mark.parametrize(
    "setup", [(), ("/verify block",), ("/gamma auto",), ("/verify coupled", "/processor multinomial 1.5")]
)
@pytest.mark.parametrize("build", [tiny_llama, tiny_sliding])
def test_any_drafter_leaves_the_text_as_it_is(tmp_path, setup, build):
    """Also one that sees a window only, whose text is written otherwise as it grows."""
    pair = pair_of(build(3, vocab_size=WORDS), word_tokenizer(), word_tokenizer(7))
    assert "speculative" in runs(pair, tmp_path, *setup, "w5 w9 w250 w3 " * 6)


def test_bytes_that_are_no_text_yet_are_not_sent(tmp_path):
    pair = pair_of(tiny_llama(3, vocab_size=300), tiny_tokenizer(chat=False), tiny_tokenizer(chat=False, shift=1))
    assert "speculative" in runs(pair, tmp_path, "hé🙂")
    bytes_of = Translation(pair.tokenizer, pair.drafter_tokenizer)
    context, heard = pair.tokenizer("a")["input_ids"], pair.drafter_tokenizer("a")["input_ids"]
    smile = pair.drafter_tokenizer("é🙂")["input_ids"]
    assert bytes_of.heard(context) == heard
    assert bytes_of.said(context, heard, smile) == pair.tokenizer("é🙂")["input_ids"]
    assert bytes_of.said(context, heard, smile[:3]) == pair.tokenizer("é")["input_ids"]


def test_what_it_read_before_is_not_computed_again(monkeypatch):
    """Round by round only new words are fed, as long as the old ones are written as before."""
    target = tiny_llama(0, vocab_size=WORDS)
    fed = []
    drafter = renamed(target, 7)
    drafter.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    opened = lambda: ModelSession(drafter)  # noqa: E731
    translated = CrossTokenizerDrafter(opened, Translation(word_tokenizer(), word_tokenizer(7)), WORDS)
    context = list(range(5, 45))
    translated.begin(context, context)
    first = translated.propose(context, 3).tokens
    assert len(first) == 3 and fed == [40, 1, 1]
    fed.clear()
    translated.propose([*context, first[0], 77], 2)
    assert fed == [1, 1]


def test_it_cannot_run_alone(tmp_path):
    view = screen()
    session = open_session(view, pair_of(tiny_llama(3, vocab_size=WORDS), word_tokenizer(), word_tokenizer(7)))
    for line in ("/speculative off", "/drafter on", "w1 w2"):
        session.handle(line)
    assert "its tokenizer is not the target's" in view.take()[1]


def test_drafts_that_were_worked_out_and_could_not_be_said_are_told(monkeypatch):
    pair = pair_of(tiny_llama(3, vocab_size=300), tiny_tokenizer(chat=False), tiny_tokenizer(chat=False, shift=1))
    smile = pair.drafter_tokenizer("é🙂")["input_ids"]
    translation = Translation(pair.tokenizer, pair.drafter_tokenizer)
    drafter = CrossTokenizerDrafter(lambda: ModelSession(pair.drafter), translation, 300)
    monkeypatch.setattr(drafter, "_likeliest", lambda heard, count: smile[:-1])
    context = pair.tokenizer("a")["input_ids"]
    drafter.begin(context, context)
    draft = drafter.propose(context, 8)
    sent = pair.tokenizer("é")["input_ids"]
    assert draft.tokens == sent and draft.unsent == len(smile) - 1 - len(sent) > 0
