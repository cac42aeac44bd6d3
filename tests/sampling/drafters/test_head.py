"""A head drafts exactly what it was trained to guess, from features that the target computed anyway, and never changes the text."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from fakes import tiny_pair
from test_same_text import PROCESSORS
from tiny import tiny_head, tiny_llama, tiny_sliding
from toys import decoding

from sampling import RULES, FreeHead, HeadDrafter, HeadSession, autoregressive_steps, speculative_steps
from sampling.distill.generate import Page
from sampling.distill.students import HeadStudent
from utils.comparison.job import Job
from utils.config.settings import Settings
from utils.decode.model_info import hidden_features
from utils.decode.model_session import ModelSession
from utils.engine import Engine
from utils.engine.module_swap import EngineLinear
from utils.errors import UserError
from utils.metrics.results import acceptance_of, tokens_of
from utils.pairs.drafter_kinds import free_drafter, loaded_drafter

PROMPT = [3, 1, 4, 1, 5]
SIZE = 8  # a vocabulary so small that random drafts are often right


def features_of(target, tokens):
    """(1, T, F) by one whole forward."""
    with torch.no_grad():
        return hidden_features(target(input_ids=torch.tensor([tokens]), output_hidden_states=True), (1, -1))


def texts(target, model, rule, how, *, gamma=4, cache=True):
    """The plain text, the text with a head, and the rounds it took."""
    plain = tokens_of(autoregressive_steps(PROMPT, ModelSession(target, rewinds=False), how))
    session = ModelSession(target, use_cache=cache, features=model.head.shape.layers)
    drafter = HeadDrafter(HeadSession(model), how, session.vocab_size, shares_noise=RULES[rule].shares_noise)
    steps = list(speculative_steps(PROMPT, drafter, session, how, gamma=gamma, rule=RULES[rule]))
    return plain, tokens_of(steps), steps


@pytest.mark.parametrize("known", [3, 6])
def test_drafting_computes_what_training_computed(known):
    """Entry by entry and step by step, behind `known` true features: the unrolled head with its masks, and the session with its cache."""
    target = tiny_llama()
    model = tiny_head(target)
    tokens = [7, 11, 2, 29, 31, 5, 17, 40, 8, 1]
    features = features_of(target, tokens)
    page = Page(torch.tensor([tokens]), features, torch.ones(1, len(tokens), dtype=torch.bool), torch.zeros(1))
    student = HeadStudent(model.head, model.embed, model.rows.weight, model.vocabulary)
    model.head.config._attn_implementation = "sdpa"
    unrolled = [step.states @ step.rows.T for step in student.predictions(page, 3)]
    model.head.config._attn_implementation = "row_invariant"
    session = HeadSession(model)
    session.begin(tokens[: known + 1])
    session.see(features[0], 0, known)
    for step in range(3):
        logits = session.feed(tokens[: known + 1 + step], keep=1)
        assert torch.allclose(logits[:, model.vocabulary], unrolled[step][:, known - 1], atol=1e-4)
        others = torch.ones(64, dtype=torch.bool).index_fill_(0, model.vocabulary, False)
        assert torch.isneginf(logits[0, others]).all() and others.any()


@pytest.mark.parametrize(
    ("build", "rule", "cache"), [*product([tiny_llama, tiny_sliding], ["coupled", "rejection", "block"], [True, False])]
)
def test_the_text_is_plain_decodings_own(build, rule, cache):
    target = build(vocab_size=SIZE)
    model = tiny_head(target, vocabulary=range(SIZE - 1))
    accepted = 0
    for index, processor in enumerate(PROCESSORS if rule == "coupled" else PROCESSORS[:1]):
        plain, text, steps = texts(target, model, rule, decoding(40, processor=processor, seed=index), cache=cache)
        assert text == plain
        accepted += sum(step.accepted for step in steps)
    assert accepted


def test_the_first_round_declines_and_the_others_draft():
    target = tiny_llama(vocab_size=SIZE)
    _, _, steps = texts(target, tiny_head(target), "rejection", decoding(30, processor=PROCESSORS[0]))
    made = [len(tokens_of(steps[:index])) for index in range(len(steps))]
    assert [len(step.drafted) for step in steps] == [0, *(min(4, 30 - before - 1) for before in made[1:])]


def test_nothing_is_computed_twice():
    """The target reads every position once and every rejected draft once; so does the head."""
    target = tiny_llama(vocab_size=SIZE)
    model = tiny_head(target)
    rows = []
    hook = target.register_forward_hook(
        lambda module, args, kwargs, output: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    own = []
    model.head.register_forward_hook(lambda module, args, output: own.append(output.shape[1]))
    how = decoding(30, processor=PROCESSORS[0])
    session = ModelSession(target, features=model.head.shape.layers)
    steps = list(speculative_steps(PROMPT, HeadDrafter(HeadSession(model), how, SIZE), session, how, gamma=4))
    hook.remove()
    assert rows == [len(PROMPT), *(len(step.drafted) + 1 for step in steps[1:])]
    guessed = sum(max(0, len(step.drafted) - 1) for step in steps)
    read = len(PROMPT) + len(tokens_of(steps[: max(index for index, step in enumerate(steps) if step.drafted)])) - 1
    assert sum(own) == guessed + read


def test_a_head_may_be_read_from_a_shared_prefill():
    """Many draws of one prompt fork sessions that have read it: the prompt's features come along, so the first round drafts too."""
    pair = head_pair()
    settings = Settings(gamma=3, length=30, verify="coupled", chat=False)
    alone = run(Job(PROMPT, pair, settings, None))
    shared: dict = {}
    runs = [run(Job(PROMPT, pair, settings, None, read=shared)) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2] and tokens_of(runs[0]) == tokens_of(alone)
    assert not alone[0].drafted and all(steps[0].drafted for steps in runs)
    session = HeadSession(pair.drafter)
    session.begin(PROMPT)
    session.see(features_of(pair.target, PROMPT)[0], 0, len(PROMPT) - 1)
    assert runs[0][0].drafted[0] == int(session.feed(PROMPT, keep=1).argmax())


def run(job):
    drafter, target = loaded_drafter(job, RULES[job.settings.verify])
    return tuple(
        speculative_steps(
            job.prompt, drafter, target, job.decoding, gamma=job.settings.gamma, rule=RULES[job.settings.verify]
        )
    )


def head_pair(**overrides):
    pair = tiny_pair(**overrides)
    pair.drafter, pair.drafter_kind = tiny_head(pair.target), "head"
    return pair


def test_a_head_alone_goes_on_from_the_features_of_the_prompt():
    pair = head_pair()
    job = Job(PROMPT, pair, Settings(length=12, chat=False), None)
    text = tokens_of(autoregressive_steps(PROMPT, free_drafter(job), job.decoding))
    model = pair.drafter
    session = HeadSession(model)
    session.begin(PROMPT)
    session.see(features_of(pair.target, PROMPT)[0], 0, len(PROMPT) - 1)
    expected = list(PROMPT)
    for _ in range(12):
        expected.append(int(session.feed(expected, keep=1).argmax()))
    assert len(text) == 12 and expected[len(PROMPT) :] == text
    with pytest.raises(UserError, match="two tokens"):
        FreeHead(model, pair.target).begin([1])


def test_a_session_that_keeps_no_features_is_an_error_not_a_guess():
    target = tiny_llama(vocab_size=SIZE)
    how = decoding(9, processor=PROCESSORS[0])
    drafter = HeadDrafter(HeadSession(tiny_head(target)), how, SIZE)
    with pytest.raises(UserError, match=r"features=head\.shape\.layers"):
        list(speculative_steps(PROMPT, drafter, ModelSession(target), how, gamma=2))


def test_a_context_that_ends_stops_the_drafts():
    target = tiny_llama(vocab_size=SIZE, max_position_embeddings=24)
    model = tiny_head(target)
    plain, text, _ = texts(target, model, "coupled", decoding(60, processor=PROCESSORS[0]))
    assert text == plain and len(text) == 24 - len(PROMPT)


def test_a_good_head_is_accepted():
    """A head that happens to know: its guess at the next law is the target's, so every draft stands."""
    target = tiny_llama(vocab_size=SIZE)
    oracle = SimpleNamespace(calls=0)
    model = tiny_head(target)

    def knows(context, keep):
        oracle.calls += 1
        with torch.no_grad():
            return target(input_ids=torch.tensor([context])).logits[0, -1:]

    session = HeadSession(model)
    session.feed = knows
    how = decoding(30, processor=PROCESSORS[2])
    target_session = ModelSession(target, features=model.head.shape.layers)
    steps = list(speculative_steps(PROMPT, HeadDrafter(session, how, SIZE), target_session, how, gamma=4))
    assert acceptance_of(steps) == 1.0 and oracle.calls


def test_an_engine_computes_the_head_too_and_gives_it_back():
    target = tiny_llama(vocab_size=SIZE)
    model = tiny_head(target)
    before = {name: part.clone() for name, part in model.state_dict().items()}
    how = decoding(30, processor=PROCESSORS[1], seed=4)
    plain = texts(target, model, "coupled", how)
    engine = Engine([target], helpers=[model])
    assert engine.use("invariant", 1).verified
    assert any(isinstance(part, EngineLinear) for part in model.head.modules()) and isinstance(model.rows, EngineLinear)
    packed = texts(target, model, "coupled", how)
    assert packed[0] == packed[1] == plain[0] and [step.drafted for step in packed[2]] == [
        step.drafted for step in plain[2]
    ]
    engine.use("plain", 1)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert texts(target, model, "coupled", how)[2] == plain[2]
