"""With greedy decoding every strategy gives the target's text: for the greedy form of every processor, with and without
cache, and for every gamma, drafter and kind of model.

The reference is computed by `model(...)` alone, without session, cache and processor.
"""

from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
from tiny import SHALLOW, next_logits, tiny_sliding

from ngram_assisted import NGramStorage, OneLevelNGramStorage, ngram_assisted_speculative_generate
from sampling import (
    ModelDrafter,
    autoregressive_generate,
    autoregressive_generate_encoder_decoder,
    speculative_generate,
    speculative_generate_encoder_decoder,
    speculative_steps,
)
from utils.decode.decoding import Decoding
from utils.decode.model_session import ModelSession
from utils.logits_processor import (
    GreedyProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
)
from utils.metrics.results import tokens_of

PROMPT = [5, 9, 13, 9, 5, 9, 13, 2]
LENGTH = 10
NO_END = -1
GREEDY_FORMS = [
    GreedyProcessor(),
    GreedyProcessor(3.0),
    MultinomialProcessor(0),
    TopKProcessor(1.0, 1),
    NucleusProcessor(1.0, 1e-9),
    TopKNucleusProcessor(0.0, 5, 0.9),
]
BUILDERS = SHALLOW
DRAFTERS = ["itself", "other", "opposed", "random"]


def reference(model: Any, prompt: list[int], length: int) -> list[int]:
    """Greedy decoding with one uncached forward pass per token."""
    made: list[int] = []
    for _ in range(length):
        made.append(int(next_logits(model, prompt, made).argmax()))
    return made


class Negated(torch.nn.Module):
    """A model with the negated logits of a different model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner, self.config, self.generation_config, self.device = (
            model,
            model.config,
            model.generation_config,
            model.device,
        )
        self._is_stateful = False

    def forward(
        self, input_ids: Any = None, past_key_values: Any = None, logits_to_keep: int = 0, **arguments: Any
    ) -> Any:
        output = self.inner(input_ids=input_ids, past_key_values=past_key_values, **arguments)
        output.logits = -output.logits
        return output


def drafter_for(kind: str, name: str, target: Any) -> Any:
    if name == "itself":
        return target
    if name == "opposed":
        return Negated(target)
    return other_model(kind, is_random=name == "random")


@cache
def other_model(kind: str, *, is_random: bool) -> Any:
    model = BUILDERS[kind](seed=1)
    if is_random:
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.01)
    return model


@pytest.fixture(scope="module")
def targets() -> dict[str, Any]:
    return {kind: build(seed=0) for kind, build in BUILDERS.items()}


@pytest.fixture(scope="module")
def references(targets: dict[str, Any]) -> dict[str, list[int]]:
    texts = {kind: reference(model, PROMPT, LENGTH) for kind, model in targets.items()}
    assert all(len(set(text)) > 4 for text in texts.values()), "a text of few different tokens proves little"
    return texts


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("kind", BUILDERS)
def test_autoregressive_text_equals_the_reference(kind: str, use_cache: bool, targets: dict, references: dict) -> None:
    for processor in GREEDY_FORMS:
        made = autoregressive_generate(PROMPT, targets[kind], LENGTH, processor, NO_END, use_cache=use_cache, seed=1)
        assert made == references[kind], processor


GAMMAS = (0, 1, 3, 6)
# Every model meets every drafter with and without a cache, and every gamma with two drafters.
SELECTION = [
    (kind, DRAFTERS[(index + 2 * use_cache + row) % 4], gamma, use_cache)
    for row, kind in enumerate(BUILDERS)
    for index, gamma in enumerate(GAMMAS)
    for use_cache in (True, False)
]


def test_the_selection_covers_all_pairs_of_choices() -> None:
    choices: list[Any] = [BUILDERS, DRAFTERS, GAMMAS, (True, False)]
    for first, second in combinations(range(4), 2):
        assert {(row[first], row[second]) for row in SELECTION} == set(product(choices[first], choices[second]))
    assert {(row[0], row[1], row[3]) for row in SELECTION} == set(product(BUILDERS, DRAFTERS, (True, False)))


@pytest.mark.parametrize(("kind", "name", "gamma", "use_cache"), SELECTION)
def test_speculative_text_equals_the_reference(
    kind: str, name: str, gamma: int, use_cache: bool, targets: dict, references: dict
) -> None:
    drafter = drafter_for(kind, name, targets[kind])
    for first_target, processor in (
        (True, GREEDY_FORMS[0]),
        (False, GREEDY_FORMS[(gamma + len(name)) % len(GREEDY_FORMS)]),
    ):
        made, rate = speculative_generate(
            PROMPT,
            drafter,
            targets[kind],
            gamma=gamma,
            logits_processor=processor,
            max_gen_len=LENGTH,
            eos_tokens_id=NO_END,
            use_cache=use_cache,
            first_target=first_target,
            seed=2,
            verify=("rejection", "block", "coupled")[(gamma + len(kind)) % 3] if first_target else "block",
        )
        assert made == references[kind]
        assert rate == (0.0 if gamma == 0 else 1.0) if name == "itself" else rate < 1.0


@pytest.mark.parametrize(
    ("kind", "gamma", "use_cache"),
    [  # every model meets every gamma, and half of them with a cache
        pytest.param(kind, gamma, use_cache, marks=() if (row + index + use_cache) % 2 else pytest.mark.full)
        for row, kind in enumerate(BUILDERS)
        for index, gamma in enumerate(GAMMAS)
        for use_cache in (True, False)
    ],
)
def test_ngram_assisted_text_equals_the_reference(
    kind: str, gamma: int, use_cache: bool, targets: dict, references: dict
) -> None:
    storages = ((2, NGramStorage), (3, OneLevelNGramStorage), (4, NGramStorage))
    for stop_if_unknown in (True, False):
        order, storage_class = storages[(gamma + stop_if_unknown) % 3]
        made, rate = ngram_assisted_speculative_generate(
            PROMPT,
            storage_class(order, 64),
            targets[kind],
            gamma=gamma,
            max_gen_len=LENGTH,
            eos_tokens_id=NO_END,
            use_cache=use_cache,
            first_target=not stop_if_unknown,
            stop_if_unknown=stop_if_unknown,
            seed=3,
        )
        assert made == references[kind]
        assert 0.0 <= rate <= 1.0


def test_all_drafts_of_a_storage_that_holds_the_text_are_accepted(targets: dict, references: dict) -> None:
    storage = OneLevelNGramStorage(9, 64)
    storage.initialize(PROMPT + references["llama"])
    made, rate = ngram_assisted_speculative_generate(
        PROMPT, storage, targets["llama"], gamma=5, max_gen_len=LENGTH, eos_tokens_id=NO_END, first_target=False, seed=0
    )
    assert (made, rate) == (references["llama"], 1.0)


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_short_texts_have_the_requested_length(length: int, targets: dict, references: dict) -> None:
    for gamma in (1, 4, 9):
        made, _ = speculative_generate(
            PROMPT,
            targets["llama"],
            targets["llama"],
            gamma=gamma,
            max_gen_len=length,
            eos_tokens_id=NO_END,
            first_target=False,
        )
        assert made == references["llama"][:length]


def test_the_encoder_decoder_names_are_the_same_functions(targets: dict, references: dict) -> None:
    made = autoregressive_generate_encoder_decoder(PROMPT, targets["t5"], LENGTH, eos_tokens_id=NO_END)
    assert made == references["t5"]
    assert (
        speculative_generate_encoder_decoder(
            PROMPT, targets["t5"], targets["t5"], max_gen_len=LENGTH, eos_tokens_id=NO_END
        )[0]
        == made
    )


@pytest.mark.parametrize("kind", ["llama", "sliding", "t5"])
@pytest.mark.parametrize("offset", [1, -1])
def test_a_rewind_that_is_off_by_one_is_detected(kind: str, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On several models, since one model may happen not to attend to the wrong row."""
    rewind = ModelSession.rewind

    def off_by_one(self: ModelSession, length: int) -> None:
        # One stale row stays in the cache, or one row is missing that the next feed relies on.
        rewind(self, length + offset)
        self._cached = min(self._cached + max(-offset, 0), length)

    monkeypatch.setattr(ModelSession, "rewind", off_by_one)

    def differs(seed: int) -> bool:
        target, drafter = BUILDERS[kind](seed=seed), BUILDERS[kind](seed=seed + 10)
        made, _ = speculative_generate(
            PROMPT, drafter, target, gamma=4, max_gen_len=12, eos_tokens_id=NO_END, first_target=False
        )
        return made != reference(target, PROMPT, 12)

    assert any(map(differs, range(6)))


def test_verifying_greedy_drafts_by_the_softmax_is_detected(targets: dict, references: dict) -> None:
    """Greedy drafts verified by p/q of the full softmax: a draft may be accepted that is not the target's argmax."""
    greedy = Decoding.of(GreedyProcessor(), LENGTH, end_ids=None, seed=0)
    soft = Decoding.of(MultinomialProcessor(1.0), LENGTH, end_ids=None, seed=0)
    target = ModelSession(targets["llama"])
    drafter = ModelDrafter(ModelSession(BUILDERS["llama"](seed=1)), greedy, target.vocab_size)
    assert tokens_of(speculative_steps(PROMPT, drafter, target, soft, gamma=4)) != references["llama"]


@pytest.mark.parametrize("length", [16, pytest.param(80, marks=pytest.mark.full)])
def test_equality_holds_beyond_the_sliding_window_and_for_a_long_text(length: int) -> None:
    target, drafter = tiny_sliding(seed=4), tiny_sliding(seed=5)
    expected = reference(target, PROMPT, length)
    options = {"max_gen_len": length, "eos_tokens_id": NO_END}
    for gamma, draft_model in ((3, drafter), (6, target), (12, drafter)):
        assert speculative_generate(PROMPT, draft_model, target, gamma=gamma, **options)[0] == expected
    for gamma in (3, 12):
        storage = NGramStorage(3, 64)
        assert ngram_assisted_speculative_generate(PROMPT, storage, target, gamma=gamma, **options)[0] == expected


def test_the_drafters_vocabulary_may_be_larger_or_smaller() -> None:
    target = BUILDERS["llama"](seed=0)
    expected = reference(target, PROMPT, LENGTH)
    for size in (72, 60):
        drafter = BUILDERS["llama"](seed=1, vocab_size=size)
        for processor in (GreedyProcessor(), MultinomialProcessor(1.0), TopKProcessor(1.0, 62)):
            made, _ = speculative_generate(PROMPT, drafter, target, None, 4, processor, LENGTH, NO_END, seed=5)
            assert len(made) == LENGTH
            assert made == expected or not isinstance(processor, GreedyProcessor)
