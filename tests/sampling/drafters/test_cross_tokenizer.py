"""Drafters with a different tokenizer never change the text, and all drafts of a perfect one are accepted."""

import copy

import pytest
import torch
from fakes import open_session, records_of, screen, tiny_pair
from tiny import tiny_llama, tiny_sliding, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from toys import chain, session
from transformers import PreTrainedTokenizerFast

from sampling.drafters.cross_tokenizer import CrossTokenizerDrafter, Retokenizer
from utils.decode.model_session import ModelSession
from utils.repl.repl_session import Verdict

WORDS = 300


def word_tokenizer(shift=0):
    """One token per word: every list of ids is a text, and tokenizing that text gives the same ids."""
    vocab = {"<end>": 0} | {f"w{index}": 1 + (index + shift) % (WORDS - 1) for index in range(WORDS - 1)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<end>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", unk_token="<end>")


def renamed(model, shift):
    """The same model with the ids of a shifted tokenizer."""
    twin = copy.deepcopy(model)
    new_ids = torch.tensor([0, *(1 + (index + shift) % (WORDS - 1) for index in range(WORDS - 1))])
    with torch.no_grad():
        for ours, theirs in ((model.model.embed_tokens, twin.model.embed_tokens), (model.lm_head, twin.lm_head)):
            theirs.weight[new_ids] = ours.weight
    return twin


def pair_of(drafter, ours, theirs, target=None):
    pair = tiny_pair(chat=False)
    pair.target = target or pair.target
    pair.drafter, pair.tokenizer, pair.drafter_tokenizer = drafter, ours, theirs
    pair.end_ids = frozenset()
    pair.engine = type(pair.engine)([pair.target, pair.drafter])
    return pair


def runs(pair, folder, *lines):
    """The records of the last line by strategy. Each text must be the target's."""
    session = open_session(screen(), pair, folder / "r.jsonl")
    for line in ("/length 12", "/gamma 4", *lines):
        assert session.handle(line) is Verdict.DONE, line
    records = {record["strategy"]: record for record in records_of(folder / "r.jsonl")}
    assert all(record["same_as_baseline"] for record in records.values())
    return records


@pytest.mark.parametrize("cache", ["on", "off"])
def test_all_drafts_of_a_perfect_drafter_are_accepted(tmp_path, cache):
    target = tiny_llama(0, vocab_size=WORDS)
    pair = pair_of(renamed(target, 7), word_tokenizer(), word_tokenizer(7), target)
    record = runs(pair, tmp_path, f"/cache {cache}", "/ngram off", "w5 w9 w250 w3")["speculative"]
    assert record["acceptance_rate"] == 1.0 and record["drafted"] > 5


@pytest.mark.parametrize(
    ("setup", "build"),
    [
        ((), tiny_sliding),
        (("/verify block",), tiny_llama),
        (("/gamma auto",), tiny_sliding),
        (("/gamma auto",), tiny_llama),
        (("/verify coupled", "/processor multinomial 1.5"), tiny_llama),
    ],
)
def test_no_drafter_changes_the_text(tmp_path, setup, build):
    """Not even one with sliding-window attention, whose earlier text may be tokenized differently as it grows."""
    pair = pair_of(build(3, vocab_size=WORDS), word_tokenizer(), word_tokenizer(7))
    assert "speculative" in runs(pair, tmp_path, *setup, "w5 w9 w250 w3 " * 6)


def test_incomplete_characters_are_not_proposed(tmp_path):
    pair = pair_of(tiny_llama(3, vocab_size=300), tiny_tokenizer(chat=False), tiny_tokenizer(chat=False, shift=1))
    assert "speculative" in runs(pair, tmp_path, "hé🙂")
    retokenizer = Retokenizer(pair.tokenizer, pair.drafter_tokenizer)
    context, read = pair.tokenizer("a")["input_ids"], pair.drafter_tokenizer("a")["input_ids"]
    smile = pair.drafter_tokenizer("é🙂")["input_ids"]
    assert retokenizer.to_drafter(context) == read
    assert retokenizer.to_target(context, read, smile) == pair.tokenizer("é🙂")["input_ids"]
    assert retokenizer.to_target(context, read, smile[:3]) == pair.tokenizer("é")["input_ids"]


def test_text_that_was_fed_is_not_computed_again():
    """Each round feeds only new words, as long as the earlier text is tokenized as before."""
    target = tiny_llama(0, vocab_size=WORDS)
    fed = []
    drafter = renamed(target, 7)
    drafter.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    retokenizer = Retokenizer(word_tokenizer(), word_tokenizer(7))
    cross = CrossTokenizerDrafter(lambda: ModelSession(drafter), retokenizer, WORDS)
    context = list(range(5, 45))
    cross.begin(context, context)
    first = cross.propose(context, 3).tokens
    assert len(first) == 3 and fed == [40, 1, 1]
    fed.clear()
    cross.propose([*context, first[0], 77], 2)
    assert fed == [1, 1]


def test_it_cannot_run_alone():
    view = screen()
    session = open_session(view, pair_of(tiny_llama(3, vocab_size=WORDS), word_tokenizer(), word_tokenizer(7)))
    for line in ("/speculative off", "/ngram off", "/target off", "/drafter on"):
        assert session.handle(line) is Verdict.DONE
    assert session.handle("w1 w2") is Verdict.FAILED and "tokenizer" in view.take()[1]


def test_drafts_that_cannot_be_retokenized_are_counted():
    pair = pair_of(tiny_llama(3, vocab_size=300), tiny_tokenizer(chat=False), tiny_tokenizer(chat=False, shift=1))
    smile = pair.drafter_tokenizer("é🙂")["input_ids"]
    retokenizer = Retokenizer(pair.tokenizer, pair.drafter_tokenizer)
    context = pair.tokenizer("a")["input_ids"]
    model = chain([*retokenizer.to_drafter(context), *smile[:-1], pair.drafter_tokenizer.eos_token_id], 300)
    drafter = CrossTokenizerDrafter(lambda: session(model), retokenizer, 300)
    drafter.begin(context, context)
    draft = drafter.propose(context, 8)
    proposed = pair.tokenizer("é")["input_ids"]
    assert draft.tokens == proposed and draft.withheld == len(smile) - 1 - len(proposed) > 0
