"""The text that a target generates for training: conversations, the source of each token, and the features."""

import random

import pytest
import torch
from tiny import hidden_features, tiny_llama, tiny_tokenizer
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from sampling.distill.chat_script import ANSWER, QUESTION, TEMPLATE, Conversation, Script, openings
from sampling.distill.pages import PageGenerator, sample_by_inversion
from utils.engine import attention

LAYERS = (1, -1)


def script_of(tokenizer, questions=()):
    return Script.from_tokenizer(tokenizer, frozenset({tokenizer.eos_token_id}), list(questions))


def page_of(model, *, seed=0, length=40, questions=()):
    script = script_of(tiny_tokenizer(model.config.vocab_size), questions)
    generator = PageGenerator(model, script, LAYERS, rows=6, length=length)
    return generator.generate(seed, complete=bool(questions)), script


def test_a_page_matches_the_target():
    """Features equal those of one forward pass per row, and greedy answers consist of the target's likeliest tokens."""
    model = tiny_llama(vocab_size=300)
    page, script = page_of(model, length=90, questions=["Why?"])
    with torch.no_grad():
        output = model(input_ids=page.tokens.long(), output_hidden_states=True)
    assert torch.allclose(page.features.float(), hidden_features(output, LAYERS), atol=0.05, rtol=0.02)
    assert not page.generated[:, : len(script.prefix)].any()
    assert page.tokens[:, : len(script.prefix)].tolist() == [list(script.prefix)] * 6
    greedy = (page.answers & (page.temperatures == 0)[:, None])[:, 1:]
    assert greedy.any() and torch.equal(output.logits.argmax(-1)[:, :-1][greedy], page.tokens[:, 1:].long()[greedy])


def test_a_seed_determines_the_page():
    model = tiny_llama(vocab_size=300)
    assert torch.equal(page_of(model, seed=3)[0].tokens, page_of(model, seed=3)[0].tokens)
    assert not torch.equal(page_of(model, seed=3)[0].tokens, page_of(model, seed=4)[0].tokens)


def test_the_template_is_inserted_between_turns():
    tokenizer = tiny_tokenizer()
    script, end = script_of(tokenizer), tokenizer.eos_token_id
    conversation = Conversation(script, 0.0, ())
    sampled = [0] * len(script.prefix) + [65, 66, end] + [0] * (len(script.answer_prefix) - 1) + [67, end]
    row = [conversation.next_token(token) for token in sampled]
    assert "".join(tokenizer.decode([token for token, _ in row])) == (
        "<|im_start|>system\nYou are a tiny model<|im_end|>\n<|im_start|>user\n"
        + tokenizer.decode([65, 66]) + "<|im_end|>\n<|im_start|>assistant\n" + tokenizer.decode([67]) + "<|im_end|>"
    )  # fmt: skip
    assert [(token, source) for token, source in row if source != TEMPLATE] == [
        (65, QUESTION),
        (66, QUESTION),
        (67, ANSWER),
        (end, ANSWER),
    ]
    assert conversation.temperature > 0 and tokenizer.decode(conversation.inserted) == "\n<|im_start|>user\n"


def test_complete_questions_are_answered():
    page, script = page_of(tiny_llama(vocab_size=300), length=70, questions=["Why?"])
    start = [*script.prefix, *script.encode("Why?"), *script.answer_prefix]
    assert page.tokens[:, : len(start)].tolist() == [start] * 6
    assert not page.generated[:, : len(start)].any() and page.generated[:, len(start)].all()


def test_openings_cover_all_groups_and_many_subjects():
    """Of six groups one is open-ended, two are questions, two are requests and one is code; few openings repeat."""
    script, rng = script_of(tiny_tokenizer()), random.Random(0)
    drawn = [script.draw_opening(rng) for _ in range(1000)]
    code = {script.encode(text) for text in openings()[-1]}
    assert 120 < sum(ids in code for ids in drawn) < 240
    assert sum(ids == () for ids in drawn) > 8 and len(set(drawn)) > 700
    assert not any("{" in text or text != text.strip() for group in openings()[1:] for text in group)


def test_sampling_by_inversion_follows_the_distribution():
    """Chi-square over 120,000 samples and three blocks, the last one incomplete; false alarm probability 1e-6."""
    torch.manual_seed(0)
    logits, count = torch.randn(1, 600) * 2, 120_000
    drawn = [sample_by_inversion(logits.expand(4000, -1).clone(), torch.rand(4000, 1)) for _ in range(count // 4000)]
    expected = torch.softmax(logits[0].double(), -1) * count
    statistic = ((torch.bincount(torch.cat(drawn), minlength=600) - expected) ** 2 / expected).sum()
    assert statistic < 599 + 4.9 * (2 * 599) ** 0.5 + 10
    assert sample_by_inversion(logits.expand(2, -1).clone(), torch.tensor([[0.0], [1.0]])).tolist() == [0, 599]


def test_a_model_without_a_template_generates_text():
    tokenizer = tiny_tokenizer(chat=False)
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    conversation = Conversation(script_of(tokenizer), 0.7, ())
    row = [conversation.next_token(token) for token in (9, 9, 9, end, 9)]
    assert row == [(start, TEMPLATE), (9, ANSWER), (9, ANSWER), (end, ANSWER), (start, TEMPLATE)]


@pytest.mark.parametrize("name", ["refuses", "row_invariant"])
def test_unsupported_attention_stays_as_it_is(monkeypatch, name):
    def refuses(*args, **kwargs):
        raise NotImplementedError("soft-capping, attention sinks or a bias")

    AttentionInterface.register("refuses", refuses)
    AttentionMaskInterface.register("refuses", sdpa_mask)
    monkeypatch.setattr(attention, "NAME", name)
    model = tiny_llama(vocab_size=300)
    page, _ = page_of(model, length=70, questions=["Why?"])
    assert model.config._attn_implementation == ("sdpa" if name == "refuses" else name) and page.generated.any()
