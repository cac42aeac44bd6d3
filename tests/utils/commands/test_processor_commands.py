"""Commands that set the logits processor as a whole or a part of it."""

import pytest
from fakes import Screen, open_session, table_pair

from utils.config.value_types import GREEDY, PROCESSOR, Limits
from utils.logits_processor import PROCESSORS
from utils.repl.repl_session import ReplSession, Verdict

PAIR = table_pair()


@pytest.fixture(scope="module")
def pair():
    return PAIR


@pytest.fixture
def session(pair, view: Screen) -> ReplSession:
    return open_session(view, pair)


CHANGES = [
    # start, line, result
    ("greedy", "/temperature 0.7", "multinomial 0.7"),
    ("greedy 0.5", "/temperature 0", "greedy 0.5"),
    ("greedy", "/top_p 0.9", "nucleus 1 0.9"),
    ("greedy", "/top_p 1", "greedy"),
    ("greedy", "/top_k 5", "topk 1 5"),
    ("greedy", "/top_k 0", "greedy"),
    ("multinomial 0.7", "/top_k 5", "topk 0.7 5"),
    ("topk 0.7 5", "/top_p 0.9", "topknucleus 0.7 5 0.9"),
    ("topknucleus 0.7 5 0.9", "/temperature 2", "topknucleus 2 5 0.9"),
    ("topknucleus 0.7 5 0.9", "/top_p off", "topk 0.7 5"),
    ("topknucleus 0.7 5 0.9", "/top_k off", "nucleus 0.7 0.9"),
    ("topknucleus 0.7 5 0.9", "/temperature 0", "greedy"),
    ("nucleus 0 0.9", "/top_k 5", "topknucleus 1 5 0.9"),
    ("nucleus 0.7 0.9", "/top_p 1.0", "multinomial 0.7"),
]


@pytest.mark.parametrize(("start", "line", "result"), CHANGES)
def test_parts_of_the_processor(start: str, line: str, result: str, session: ReplSession, view: Screen) -> None:
    session.handle(f"/processor {start}")
    view.take()
    assert session.handle(line) is Verdict.DONE
    assert PROCESSOR.show(session.settings.processor) == result
    reply = view.take()[1]
    assert f"processor: {result.removesuffix(' 0.5') if 'greedy' in result else result}" in reply


@pytest.mark.parametrize(
    "line", ["multinomial 0.123456789", "topk 100 2", "nucleus 1e-07 0.9999999", "topknucleus 33.333333333 7 0.1"]
)
def test_a_shown_processor_is_parsed_without_loss(line: str) -> None:
    kind = PROCESSOR
    value = kind.parse(line, GREEDY, Limits())
    assert kind.parse(kind.show(value), GREEDY, Limits()) == value


def test_every_name_has_a_processor() -> None:
    for name, arguments in (("greedy", "1"), ("multinomial", "1"), ("topk", "1 2"), ("nucleus", "1 .5")):
        spec = PROCESSOR.parse(f"{name} {arguments}", GREEDY, Limits())
        assert PROCESSORS[spec.name](*spec.arguments).name == name
    assert PROCESSOR.words == tuple(PROCESSORS)
