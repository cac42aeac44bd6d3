"""Matches against a brute-force search, and match drafters, which never change the text."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_llama

from ngram_assisted import LongestMatch, MatchDrafter, SuffixAutomaton
from sampling import AdaptiveGamma, ChainDrafter, autoregressive_steps, speculative_steps
from utils.decode.decoding import Decoding
from utils.decode.model_session import ModelSession
from utils.metrics.costs import Costs
from utils.metrics.results import tokens_of

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=14), min_size=1, max_size=4)


def filled(matches, texts):
    for text in texts:
        matches.separate()
        matches.extend(text)
    return matches


def occurrences(texts, piece):
    """(number, end of the last one) of the occurrences of a piece. Ends count through all texts."""
    ends, before = [], 0
    for text in texts:
        before += 1
        ends += [before + end for end in range(len(piece), len(text) + 1) if text[end - len(piece) : end] == piece]
        before += len(text)
    return len(ends), max(ends, default=0)


@given(TEXTS, st.integers(1, 5))
def test_the_automaton_follows_the_most_frequent_continuation_of_the_longest_suffix(texts, count):
    last = texts[-1]
    suffixes = [last[start:] for start in range(len(last))]
    known = next((suffix for suffix in suffixes if occurrences(texts, suffix)[0] > 1), [])
    expected, here = [], known
    while known and len(expected) < count:
        options = {token: occurrences(texts, [*here, token]) for token in range(4)}
        token = max(options, key=options.get)
        if not options[token][0]:
            break
        expected.append((token, len(here)))
        here = [*here, token]
    assert filled(SuffixAutomaton(), texts).drafts(count) == expected


@given(TEXTS, st.integers(1, 5))
def test_lookup_continues_after_the_latest_of_the_longest_matches(texts, count):
    last = texts[-1]
    best = (0, 0, [])
    for number, text in enumerate(texts):
        for end in range(2, len(text)):
            size = 0
            while (
                size < min(end, len(last))
                and text[end - 1 - size] == last[-1 - size]
                and not (text is last and end == len(last))
            ):
                size += 1
            if size >= 2 and (size, number * 100 + end) > best[:2]:
                best = (size, number * 100 + end, text[end:])
    expected = [(token, best[0] + index) for index, token in enumerate(best[2][:count])]
    assert filled(LongestMatch(), texts).drafts(count) == expected


def test_the_automaton_takes_many_tokens():
    automaton = SuffixAutomaton()
    automaton.extend([*range(50)] * 200)
    assert [token for token, _ in automaton.drafts(3)] == [0, 1, 2]


@settings(max_examples=5, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=12), st.integers(0, 8), st.booleans())
def test_the_text_is_the_autoregressive_text(prompt, gamma, adapts):
    model = MODEL
    plan = Decoding.of(None, 20, end_ids=None, seed=1)
    expected = tokens_of(autoregressive_steps(prompt, ModelSession(model, rewinds=False), plan))
    adaptive = AdaptiveGamma(Costs((0.1,))) if adapts else None
    for drafter in (
        MatchDrafter(LongestMatch(), adaptive=adaptive),
        MatchDrafter(SuffixAutomaton(), adaptive=adaptive),
        ChainDrafter(MatchDrafter(LongestMatch(3)), MatchDrafter(SuffixAutomaton())),
    ):
        assert tokens_of(speculative_steps(prompt, drafter, ModelSession(model), plan, gamma=gamma)) == expected


MODEL = tiny_llama(vocab_size=8, num_hidden_layers=1)
