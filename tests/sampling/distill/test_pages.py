"""The text that a target generates for training: conversations, the source of each token, and the features."""

import random

import pytest
import torch
from tiny import hidden_features, tiny_llama, tiny_tokenizer
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from sampling.distill import pages, students
from sampling.distill.pages import (
    ANSWER,
    DOCUMENT,
    LEAST_TEXT,
    QUESTION,
    TEMPLATE,
    Conversation,
    Corpus,
    Opening,
    PageGenerator,
    Script,
    openings,
)
from sampling.distill.students import install_engine
from utils.decode.engine_forward import engine_forward
from utils.engine import attention

LAYERS = (1, -1)


def script_of(tokenizer, questions=()):
    return Script.from_tokenizer(tokenizer, frozenset({tokenizer.eos_token_id}), list(questions))


@pytest.fixture
def page_of(tmp_path):
    """Makes the first page of a seed, and returns it with its script."""

    def make(model, *, seed=0, length=40, questions=()):
        script = script_of(tiny_tokenizer(model.config.vocab_size), questions)
        generator = PageGenerator(model, script, LAYERS, length=length)
        return generator.generate(seed, 6 * length, Corpus(tmp_path)), script

    return make


@pytest.mark.parametrize("has_engine", [False, True])
def test_a_page_matches_the_target(page_of, has_engine):
    """Features equal those of one forward pass per row, and greedy answers consist of the target's likeliest tokens."""
    model, plain = tiny_llama(vocab_size=300), tiny_llama(vocab_size=300)
    if has_engine:
        assert install_engine(model) is not None
    page, script = page_of(model, length=90, questions=["Why?"])
    with torch.no_grad():
        output = plain(input_ids=page.tokens.long(), output_hidden_states=True)
    assert torch.allclose(page.features.float(), hidden_features(output, LAYERS), atol=0.05, rtol=0.02)
    assert not page.generated[:, : len(script.prefix)].any()
    assert page.tokens[:, : len(script.prefix)].tolist() == [list(script.prefix)] * 6
    greedy = (page.answers & (page.temperatures == 0)[:, None])[:, 1:]
    assert greedy.any() and torch.equal(output.logits.argmax(-1)[:, :-1][greedy], page.tokens[:, 1:].long()[greedy])


def test_pytorch_computes_what_an_engine_cannot(page_of, monkeypatch):
    """After an error without a message as well."""
    model = tiny_llama(vocab_size=300)
    expected, _ = page_of(model)

    def failing(engine, *_):
        engine.install()
        raise RuntimeError

    monkeypatch.setattr(students, "install_with_fallback", failing)
    assert install_engine(model) is None and engine_forward(model) is None
    assert torch.equal(page_of(model)[0].features, expected.features)


def test_passes_are_small_enough_for_all_their_hidden_states(page_of, monkeypatch):
    """Six documents are inserted 24 tokens at a time, 4 of each, and give the greedy texts that one pass gives."""
    model = tiny_llama(vocab_size=300)
    questions, sizes = ["Why? " * 6], []
    whole, _ = page_of(model, length=90, questions=questions)
    monkeypatch.setattr(pages, "PASS_TOKENS", 24)
    model.register_forward_pre_hook(lambda _, __, named: sizes.append(named["input_ids"].numel()), with_kwargs=True)
    page, _ = page_of(model, length=90, questions=questions)
    assert sizes[0] == 24 and max(sizes) == 24
    greedy = page.temperatures == 0  # other rows have drawn more placeholders
    assert torch.equal(page.tokens[greedy], whole.tokens[greedy])


def test_a_seed_determines_the_page(page_of):
    model = tiny_llama(vocab_size=300)
    assert torch.equal(page_of(model, seed=3)[0].tokens, page_of(model, seed=3)[0].tokens)
    assert not torch.equal(page_of(model, seed=3)[0].tokens, page_of(model, seed=4)[0].tokens)


def test_the_template_is_inserted_between_turns():
    tokenizer = tiny_tokenizer()
    script, end = script_of(tokenizer), tokenizer.eos_token_id
    conversation = Conversation(script, 0.0, Opening())
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
    assert (
        conversation.temperature > 0
        and tokenizer.decode([token for token, _ in conversation.inserted]) == "\n<|im_start|>user\n"
    )


def test_complete_questions_are_answered(page_of):
    page, script = page_of(tiny_llama(vocab_size=300), length=70, questions=["Why?"])
    start = [*script.prefix, *script.encode("Why?"), *script.answer_prefix]
    assert page.tokens[:, : len(start)].tolist() == [start] * 6
    assert not page.generated[:, : len(start)].any() and page.generated[:, len(start)].all()


def test_openings_cover_all_groups_and_many_subjects():
    """Of nine groups one is open-ended, three are kinds of questions, and one is code; few openings repeat."""
    script, rng = script_of(tiny_tokenizer()), random.Random(0)
    drawn = [script.draw_opening(rng) for _ in range(1000)]
    code = {tuple((token, TEMPLATE) for token in script.encode(text)) for text in openings()[-1]}
    assert 70 < sum(opening.tokens in code for opening in drawn) < 155
    assert sum(opening == Opening() for opening in drawn) > 2 and len(set(drawn)) > 600
    assert not any("{" in text or text != text.strip() for group in openings()[1:] for text in group)


def test_questions_of_a_file_have_the_whole_length_on_every_page(page_of):
    """A long question would leave no room for an answer in an eighth of it."""
    model = tiny_llama(vocab_size=300, max_position_embeddings=512, num_hidden_layers=1)
    page, script = page_of(model, length=480, questions=["w" * 250])
    assert page.tokens.shape == (6, 480) and page.answers.sum() > 6 * 120 and script.complete


def test_long_conversations_are_about_earlier_answers(tmp_path, monkeypatch):
    """Pages take turns: short ones, half of the length, short ones, all of it. Documents were generated before."""
    monkeypatch.setattr(pages, "REFERENCE_TASKS", 0)
    model, length = tiny_llama(vocab_size=300, max_position_embeddings=512, num_hidden_layers=1), 480
    script, corpus = script_of(tiny_tokenizer(300)), Corpus(tmp_path)
    generator = PageGenerator(model, script, LAYERS, length=length)
    for number in range(4):
        corpus.add(generator.generate(number, 2 * length, corpus))
    found = [corpus.page(number) for number in range(4)]
    assert [page.tokens.shape for page in found] == [(5, 192), (4, 240), (5, 192), (2, 480)]
    answers = {token for text in found[0].texts for token in text}
    assert min(len(text) for text in found[0].texts) >= LEAST_TEXT and not found[0].generated.all()
    for page in found[1::2]:
        documents = page.sources == DOCUMENT
        assert 0.65 < documents.float().mean() < 0.9 and not page.answers[documents].any()
        assert page.generated[documents].all()
    breaks = set(script.encode("\n\n"))
    assert set(found[1].tokens[found[1].sources == DOCUMENT].tolist()) <= answers | breaks
    with torch.no_grad():
        output = model(input_ids=found[3].tokens.long(), output_hidden_states=True)
    assert torch.allclose(found[3].features.float(), hidden_features(output, LAYERS), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("ends", [True, False])
def test_a_task_is_complete_unless_its_question_is_missing(ends, monkeypatch):
    monkeypatch.setattr(pages, "REFERENCE_TASKS", 0)
    script, rng = script_of(tiny_tokenizer()), random.Random(0)
    tasks = [script.draw_task(rng, [(7,) * 30, (8,) * 30], 40) for _ in range(200)]
    assert {task.complete for task in tasks} == {True, False}
    words = ("Question:", "question:", "to the text,", "TL;DR:", "who", "when", "what is")
    last = [script.encode(text) for text in words]
    for task in (task for task in tasks if task.complete != ends):
        assert sum(source == DOCUMENT for _, source in task.tokens) == 40
        tail = tuple(token for token, _ in task.tokens)
        assert ends == any(tail[-len(words) :] == words for words in last)


def test_half_of_the_documents_are_parts_of_the_reference():
    """They are inserted like the template, so nothing is learned from them. By chance, fewer than 70 or more than 130
    of 200 have a probability of 2e-5.
    """
    script, rng = script_of(tiny_tokenizer()), random.Random(0)
    tasks = [script.draw_task(rng, [(7,) * 30], 40).tokens for _ in range(200)]
    inserted = [[token for token, _ in task] for task in tasks if not any(source == DOCUMENT for _, source in task)]
    assert 70 < len(inserted) < 130
    reference = script.encode(pages.REFERENCE)
    known = {reference[start : start + 40] for start in range(len(reference) - 39)}
    for task in inserted[:9]:
        assert any(tuple(task[start : start + 40]) in known for start in range(len(task) - 39))


def test_a_model_without_a_template_generates_text():
    tokenizer = tiny_tokenizer(chat=False)
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    conversation = Conversation(script_of(tokenizer), 0.7, Opening())
    row = [conversation.next_token(token) for token in (9, 9, 9, end, 9)]
    assert row == [(start, TEMPLATE), (9, ANSWER), (9, ANSWER), (end, ANSWER), (start, TEMPLATE)]


@pytest.mark.parametrize("name", ["refuses", "row_invariant"])
def test_unsupported_attention_stays_as_it_is(page_of, monkeypatch, name):
    def refuses(*args, **kwargs):
        raise NotImplementedError("soft-capping, attention sinks or a bias")

    AttentionInterface.register("refuses", refuses)
    AttentionMaskInterface.register("refuses", sdpa_mask)
    monkeypatch.setattr(attention, "NAME", name)
    model = tiny_llama(vocab_size=300)
    page, _ = page_of(model, length=70, questions=["Why?"])
    assert model.config._attn_implementation == ("sdpa" if name == "refuses" else name) and page.generated.any()
