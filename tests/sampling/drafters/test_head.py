"""A drafter that reads hidden states computes the same as in training, from states that the target has computed
anyway, and never changes the text.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from drafter_runs import round_weights
from fakes import tiny_pair
from samplers import PROCESSORS
from tiny import hidden_features, tiny_head, tiny_llama, tiny_sliding
from toys import decoding

from ngram_assisted import NGramStorage
from sampling import RULES, FreeHead, HeadDrafter, HeadSession, autoregressive_steps, speculative_steps
from sampling.distill.pages import TextPage
from sampling.distill.students import Student
from sampling.drafters import feature_sessions
from utils.comparison.strategies import Job, SharedPrefills
from utils.config.settings import Settings
from utils.decode.model_session import ModelSession
from utils.engine import Engine
from utils.engine.module_swap import EngineLinear
from utils.errors import UserError
from utils.metrics.results import acceptance_of, tokens_of
from utils.pairs.drafter_kinds import drafter_alone

PROMPT = [3, 1, 4, 1, 5]
SIZE = 8  # a vocabulary so small that random drafts are often right


def features_of(target, tokens):
    """(1, T, F) from one forward pass."""
    with torch.no_grad():
        return hidden_features(target(input_ids=torch.tensor([tokens]), output_hidden_states=True), (1, -1))


def texts(target, model, rule, plan, *, gamma=4, cache=True):
    """The autoregressive text, the text with a head, and its rounds."""
    expected = tokens_of(autoregressive_steps(PROMPT, ModelSession(target, rewinds=False), plan))
    session = ModelSession(target, use_cache=cache, features=model.feature_layers)
    drafter = HeadDrafter(HeadSession(model), plan, session.vocab_size, shares_noise=RULES[rule].shares_noise)
    steps = list(speculative_steps(PROMPT, drafter, session, plan, gamma=gamma, rule=RULES[rule]))
    return expected, tokens_of(steps), steps


@pytest.mark.parametrize("known", [3, 6])
def test_drafting_computes_what_training_computed(known):
    """After `known` features of the target: the head unrolled with its masks, against the session with its cache."""
    target = tiny_llama()
    model = tiny_head(target)
    tokens = [7, 11, 2, 29, 31, 5, 17, 40, 8, 1]
    features = features_of(target, tokens)
    page = TextPage(torch.tensor([tokens]), features, torch.ones(1, len(tokens), dtype=torch.bool), torch.zeros(1))
    student = Student(model, model.embed_tokens, model.lm_head.rows.weight, model.lm_head.vocabulary)
    unrolled = [states @ student.rows.T for states in student.predictions(page, 3)]
    model.config._attn_implementation = "row_invariant"
    session = HeadSession(model)
    session.begin(tokens[: known + 1])
    session.add_features(features[0], 0, known)
    for step in range(3):
        logits = session.feed(tokens[: known + 1 + step], keep=1)
        assert torch.allclose(logits[:, model.lm_head.vocabulary], unrolled[step][:, known - 1], atol=1e-4)
        others = torch.ones(64, dtype=torch.bool).index_fill_(0, model.lm_head.vocabulary, False)
        assert torch.isneginf(logits[0, others]).all() and others.any()


@pytest.mark.parametrize(
    ("build", "rule", "cache"),
    [
        pytest.param(
            *choice, marks=() if index in (0, 3, 5, 7, 8, 10) else pytest.mark.full
        )  # both builders, each rule
        for index, choice in enumerate(
            product([tiny_llama, tiny_sliding], ["coupled", "rejection", "block"], [True, False])
        )
    ],
)
def test_the_text_is_the_autoregressive_text(build, rule, cache):
    target = build(vocab_size=SIZE)
    model = tiny_head(target, vocabulary=range(SIZE - 1))
    accepted = 0
    for index, processor in enumerate(PROCESSORS[::2] if rule == "coupled" else PROCESSORS[:1]):
        expected, text, steps = texts(target, model, rule, decoding(14, processor=processor, seed=index), cache=cache)
        assert text == expected
        accepted += sum(step.accepted for step in steps)
    assert accepted


def test_only_the_first_round_has_no_drafts():
    target = tiny_llama(vocab_size=SIZE)
    _, _, steps = texts(target, tiny_head(target), "rejection", decoding(18, processor=PROCESSORS[0]))
    lengths = [len(tokens_of(steps[:index])) for index in range(len(steps))]  # before each round
    assert [len(step.drafted) for step in steps] == [0, *(min(4, 18 - length - 1) for length in lengths[1:])]


def test_nothing_is_computed_twice():
    """The target computes every position and every rejected draft once, and so does the head."""
    target = tiny_llama(vocab_size=SIZE)
    model = tiny_head(target)
    rows = []
    hook = target.register_forward_hook(
        lambda module, args, kwargs, output: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    own = []
    model.register_forward_hook(lambda module, args, output: own.append(output.shape[1]))
    plan = decoding(30, processor=PROCESSORS[0])
    session = ModelSession(target, features=model.feature_layers)
    steps = list(speculative_steps(PROMPT, HeadDrafter(HeadSession(model), plan, SIZE), session, plan, gamma=4))
    hook.remove()
    assert rows == [len(PROMPT), *(len(step.drafted) + 1 for step in steps[1:])]
    drafted = sum(max(0, len(step.drafted) - 1) for step in steps)
    read = len(PROMPT) + len(tokens_of(steps[: max(index for index, step in enumerate(steps) if step.drafted)])) - 1
    assert sum(own) == drafted + read


def test_a_shared_prefill_carries_the_features_of_the_prompt():
    """Runs that fork a session which has read the prompt also get its features, so they draft in the first round."""
    pair = head_pair()
    settings = Settings(gamma=3, length=16, verify="coupled", chat=False)
    job = Job(PROMPT, pair, settings, NGramStorage(3, 64))
    alone, prefills = run(job), SharedPrefills()
    runs = [run(replace(job, prefills=prefills)) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2] and tokens_of(runs[0]) == tokens_of(alone)
    assert not alone[0].drafted and all(steps[0].drafted for steps in runs)
    session = HeadSession(pair.drafter)
    session.begin(PROMPT)
    session.add_features(features_of(pair.target, PROMPT)[0], 0, len(PROMPT) - 1)
    assert runs[0][0].drafted[0] == int(session.feed(PROMPT, keep=1).argmax())


def run(job):
    rule = RULES[job.settings.verify]
    built = job.build_drafter()
    gamma = job.settings.gamma
    return tuple(speculative_steps(job.prompt, built.drafter, built.target, job.decoding, gamma=gamma, rule=rule))


def head_pair(**overrides):
    pair = tiny_pair(**overrides)
    pair.drafter, pair.drafter_kind = tiny_head(pair.target), "head"
    return pair


def test_a_head_alone_continues_from_the_features_of_the_prompt():
    pair = head_pair()
    job = Job(PROMPT, pair, Settings(length=12, chat=False), NGramStorage(3, 64))
    session = drafter_alone(job.drafter_inputs())
    text = tokens_of(autoregressive_steps(PROMPT, session, job.decoding))
    model = pair.drafter
    session = HeadSession(model)
    session.begin(PROMPT)
    session.add_features(features_of(pair.target, PROMPT)[0], 0, len(PROMPT) - 1)
    expected = list(PROMPT)
    for _ in range(12):
        expected.append(int(session.feed(expected, keep=1).argmax()))
    assert len(text) == 12 and expected[len(PROMPT) :] == text
    with pytest.raises(UserError):
        FreeHead(model, pair.target).begin([1])


def test_a_target_session_without_features_is_refused():
    target = tiny_llama(vocab_size=SIZE)
    plan = decoding(9, processor=PROCESSORS[0])
    drafter = HeadDrafter(HeadSession(tiny_head(target)), plan, SIZE)
    with pytest.raises(UserError, match=r"features=drafter\.feature_layers"):
        list(speculative_steps(PROMPT, drafter, ModelSession(target), plan, gamma=2))


def test_the_text_ends_with_the_context():
    target = tiny_llama(vocab_size=SIZE, max_position_embeddings=24)
    model = tiny_head(target)
    expected, text, _ = texts(target, model, "coupled", decoding(60, processor=PROCESSORS[0]))
    assert text == expected and len(text) == 24 - len(PROMPT)


def test_all_drafts_of_a_perfect_head_are_accepted():
    """The head's logits are replaced by the target's own."""
    target = tiny_llama(vocab_size=SIZE)
    model = tiny_head(target)

    class Oracle(HeadSession):
        def feed(self, context, keep):
            with torch.no_grad():
                return target(input_ids=torch.tensor([context])).logits[0, -1:]

    session = Oracle(model)
    plan = decoding(30, processor=PROCESSORS[2])
    target_session = ModelSession(target, features=model.feature_layers)
    steps = list(speculative_steps(PROMPT, HeadDrafter(session, plan, SIZE), target_session, plan, gamma=4))
    assert acceptance_of(steps) == 1.0


def test_an_engine_computes_the_head_and_restores_it():
    target = tiny_llama(vocab_size=SIZE)
    model = tiny_head(target)
    round_weights(model)
    before = {name: part.clone() for name, part in model.state_dict().items()}
    plan = decoding(16, processor=PROCESSORS[1], seed=4)
    before_engine = texts(target, model, "coupled", plan)
    engine = Engine([target], helpers=[model])
    assert engine.use("invariant", 1).verified
    assert any(isinstance(part, EngineLinear) for part in model.layers.modules())
    assert isinstance(model.lm_head.rows, EngineLinear)
    packed = texts(target, model, "coupled", plan)
    assert packed[0] == packed[1] == before_engine[0] and [step.drafted for step in packed[2]] == [
        step.drafted for step in before_engine[2]
    ]
    engine.use("plain", 1)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert texts(target, model, "coupled", plan)[2] == before_engine[2]


def test_a_long_prompt_is_read_in_chunks_and_gives_the_same_drafts(monkeypatch):
    """Against rows one by one, as after short prompts: equal within rounding, also after the prompt."""
    target = tiny_llama(max_position_embeddings=1024)
    model, text = tiny_head(target), [*range(64)] * 10
    features = features_of(target, text[:600])[0]
    passes, original = [], model.next_states
    monkeypatch.setattr(model, "next_states", lambda *a, **k: (passes.append(a[1].shape[1]), original(*a, **k))[1])
    found = []
    for width in (feature_sessions.MAX_WIDTH, 10_000):
        monkeypatch.setattr(feature_sessions, "MAX_WIDTH", width)
        session = HeadSession(model)
        session.begin(text[:601])
        session.add_features(features, 0, 600)
        found.append([session.feed(text[: 601 + step], keep=1)[:, model.lm_head.vocabulary] for step in range(3)])
    assert passes == [512, 88, 1, 1] * 2
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(*found, strict=True))
