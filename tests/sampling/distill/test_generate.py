"""What a target writes for a distillation: conversations, whose each token is, and what the target saw."""

import random

import pytest
import torch
from tiny import tiny_llama, tiny_tokenizer
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from sampling.distill.chat_script import ANSWERED, ASKED, FORCED, Script, Speaker
from sampling.distill.generate import Writer, inverted
from sampling.distill.prompts import openings
from utils.decode.model_session import hidden_features
from utils.engine import attention

LAYERS = (1, -1)


def page_of(model, *, seed=0, rows=6, length=40, asked=()):
    tokenizer = tiny_tokenizer(model.config.vocab_size)
    script = Script.of(tokenizer, frozenset({tokenizer.eos_token_id}), list(asked))
    return Writer(model, script, LAYERS, rows=rows, length=length).write(seed, asked=bool(asked)), script, tokenizer


def test_a_page_is_what_the_target_says_and_saw():
    """Features are those of one whole forward over each row, greedy rows hold the target's own choices, forced tokens are told apart."""
    model = tiny_llama(vocab_size=300)
    page, script, _ = page_of(model, length=90, asked=["Why?"])
    with torch.no_grad():
        output = model(input_ids=page.tokens.long(), output_hidden_states=True)
    assert torch.allclose(page.features.float(), hidden_features(output, LAYERS), atol=0.05, rtol=0.02)
    assert not page.own[:, : len(script.head)].any()
    assert page.tokens[:, : len(script.head)].tolist() == [list(script.head)] * 6
    greedy = (page.answers & (page.warmths == 0)[:, None])[:, 1:]
    assert greedy.any() and torch.equal(output.logits.argmax(-1)[:, :-1][greedy], page.tokens[:, 1:].long()[greedy])


def test_the_same_seed_writes_the_same_page():
    model = tiny_llama(vocab_size=300)
    assert torch.equal(page_of(model, seed=3)[0].tokens, page_of(model, seed=3)[0].tokens)
    assert not torch.equal(page_of(model, seed=3)[0].tokens, page_of(model, seed=4)[0].tokens)


def test_the_template_speaks_between_the_turns():
    tokenizer = tiny_tokenizer()
    script = Script.of(tokenizer, frozenset({tokenizer.eos_token_id}), [])
    end = tokenizer.eos_token_id
    speaker = Speaker(script, 0.0, ())
    said = [
        speaker.next(token)
        for token in [0] * len(script.head) + [65, 66, end] + [0] * (len(script.to_answer) - 1) + [67, end]
    ]
    assert "".join(tokenizer.decode([token for token, _ in said])) == (
        "<|im_start|>system\nYou are a tiny model<|im_end|>\n<|im_start|>user\n"
        + tokenizer.decode([65, 66]) + "<|im_end|>\n<|im_start|>assistant\n" + tokenizer.decode([67]) + "<|im_end|>"
    )  # fmt: skip
    assert [(token, voice) for token, voice in said if voice] == [
        (65, ASKED),
        (66, ASKED),
        (67, ANSWERED),
        (end, ANSWERED),
    ]
    assert speaker.temperature > 0 and tokenizer.decode(speaker.forced) == "\n<|im_start|>user\n"


def test_whole_questions_are_asked_and_answered():
    page, script, tokenizer = page_of(tiny_llama(vocab_size=300), length=70, asked=["Why?"])
    start = [*script.head, *tokenizer("Why?")["input_ids"], *script.to_answer]
    assert page.tokens[:, : len(start)].tolist() == [start] * 6
    assert not page.own[:, : len(start)].any() and page.own[:, len(start)].all()


def test_openings_are_of_every_kind_and_about_many_things():
    """A group in six opens freely, two ask, two request, one is about code; a thousand rows repeat few."""
    script = Script.of(tiny_tokenizer(), frozenset({0}), [])
    chance = random.Random(0)
    drawn = [script.opening(chance) for _ in range(1000)]
    code = {script.ids(text) for text in openings()[-1]}
    assert (
        120 < sum(ids in code for ids in drawn) < 240 and sum(ids == () for ids in drawn) > 8 and len(set(drawn)) > 700
    )
    assert not any("{" in text or text != text.strip() for group in openings()[1:] for text in group)


def test_drawing_by_blocks_follows_the_law():
    """400,000 draws against the law, of more than one block and not a whole number of them; false alarm 1e-6 (chi square)."""
    torch.manual_seed(0)
    logits, count = torch.randn(1, 600) * 2, 400_000
    drawn = torch.cat([inverted(logits.expand(4000, -1).clone(), torch.rand(4000, 1)) for _ in range(count // 4000)])
    expected = torch.softmax(logits[0].double(), -1) * count
    surprise = ((torch.bincount(drawn, minlength=600) - expected) ** 2 / expected).sum()
    assert surprise < 599 + 4.9 * (2 * 599) ** 0.5 + 10
    ends = inverted(logits.expand(2, -1).clone(), torch.tensor([[0.0], [1.0]]))
    assert ends.tolist()[0] == 0 and ends.tolist()[1] == 599


def test_a_model_without_a_template_just_writes():
    tokenizer = tiny_tokenizer(chat=False)
    script = Script.of(tokenizer, frozenset({tokenizer.eos_token_id}), [])
    speaker = Speaker(script, 0.7, ())
    first = tokenizer.bos_token_id
    assert [speaker.next(9) for _ in range(3)] == [(first, FORCED), (9, ANSWERED), (9, ANSWERED)]
    assert speaker.next(tokenizer.eos_token_id) == (tokenizer.eos_token_id, ANSWERED) and speaker.next(9) == (
        first,
        FORCED,
    )


@pytest.mark.parametrize("name", ["refuses", "row_invariant"])
def test_attention_of_a_kind_that_heads_cannot_share_is_left_as_it_is(monkeypatch, name):
    def refuses(*args, **kwargs):
        raise NotImplementedError("its attention has a cap, a sink or a bias")

    AttentionInterface.register("refuses", refuses)
    AttentionMaskInterface.register("refuses", sdpa_mask)
    monkeypatch.setattr(attention, "NAME", name)
    model = tiny_llama(vocab_size=300)
    page, _, _ = page_of(model, length=70, asked=["Why?"])
    assert model.config._attn_implementation == ("sdpa" if name == "refuses" else name) and page.own.any()
