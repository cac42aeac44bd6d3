"""Conversations: which turns are kept, what is refused, and what ends or forgets a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import Screen, open_session, table_pair, tiny_pair
from turns import START, A, handled, jobs_of, rendered

from utils.commands.setting_commands import FORGOTTEN, NO_EFFECT
from utils.comparison.strategies import STRATEGIES, Job, Strategy
from utils.decode.steps import Step
from utils.errors import UserError
from utils.prompts.conversation import prompt_ids
from utils.repl.loaded_pair import CONVERSATION_ENDED
from utils.repl.repl_session import TURN_NOT_KEPT, Verdict


def test_reset_forgets_and_reports_how_much(view: Screen) -> None:
    session = open_session(view)
    handled(session, "/turns new")
    assert FORGOTTEN.format("0 turns") in view.take()[1]
    handled(session, *START, "/turns new", "Hello", "And why?")
    assert FORGOTTEN.format("0 turns") in view.take()[1] and "| turn 2 |" in session.status()
    handled(session, "/turns new")
    assert view.take()[1].strip() == FORGOTTEN.format("2 turns") and "turn " not in session.status()
    handled(session, "Hello")
    assert (
        jobs_of(session)["target"].prompt == rendered(session.harness.pair.tokenizer, "Hello")
        and jobs_of(session)["target"].turn == 0
    )


@pytest.mark.parametrize("line", ["/turns off", "/undo"])
def test_switching_turns_off_ends_the_conversation(view: Screen, line: str) -> None:
    session = open_session(view)
    handled(session, "/length 4", "/turns on", "Hello")
    view.take()
    handled(session, line)
    assert CONVERSATION_ENDED.format("1 turn") in view.take()[1]
    handled(session, "/turns on", "/turns off", "/turns on", "Hello")
    assert jobs_of(session)["target"].turn == 0 and CONVERSATION_ENDED.partition(":")[0] not in view.take()[1]


@pytest.mark.parametrize("build", [lambda: tiny_pair(kind="t5", chat=False), lambda: table_pair(chat=False)])
def test_turns_have_no_effect_without_a_template(view: Screen, build: Any) -> None:
    session = open_session(view, build())
    view.take()
    handled(session, "/turns on")
    assert NO_EFFECT in view.take()[1]
    handled(session, "/length 3", "Hello", "And why?")
    assert jobs_of(session)["target"].turn == 0


@pytest.mark.parametrize(
    ("error", "verdict"), [(KeyboardInterrupt(), Verdict.INTERRUPTED), (UserError("no"), Verdict.FAILED)]
)
def test_a_turn_that_one_strategy_did_not_finish_is_not_kept(
    view: Screen, error: BaseException, verdict: Verdict
) -> None:
    broken = [False]

    def steps(row: Strategy, job: Job) -> Iterator[Step]:
        for step in row.steps(job):
            if broken[0]:
                raise error
            yield step

    rows = tuple(replace(row, steps=partial(steps, row)) if row.name == "ngram" else row for row in STRATEGIES)
    session = open_session(view, strategies=rows)
    handled(session, *START, "Hello")
    assert TURN_NOT_KEPT not in view.take()[1]
    broken[0] = True
    assert session.handle("And why?") is verdict
    assert TURN_NOT_KEPT in view.take()[1]
    broken[0] = False
    handled(session, "Go on")
    assert (
        all([turn.user for turn in job.history] == ["Hello"] for job in jobs_of(session).values())
        and len(jobs_of(session)) == 3
    )


def test_ctrl_c_after_the_last_answer_keeps_nothing_either(view: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    session = open_session(view)
    handled(session, *START)
    monkeypatch.setattr(view.renderer, "table", interrupted)
    assert session.handle("Hello") is Verdict.INTERRUPTED
    assert TURN_NOT_KEPT in view.take()[1] and not session.harness.state.conversations.by_name


def test_a_template_that_rejects_a_second_turn_is_reported() -> None:
    tokenizer = table_pair().tokenizer
    tokenizer.chat_template = (
        "{% if messages|length > 1 %}{{ raise_exception('one at a time {}') }}{% endif %}{{ messages[0]['content'] }}"
    )
    assert prompt_ids(tokenizer, "hi", chat=True, system=None)
    with pytest.raises(UserError, match=r"one at a time \{\}.*/turns new.*/turns off"):
        prompt_ids(tokenizer, "hi", chat=True, system=None, history=(A,))
    assert prompt_ids(tokenizer, "hi", chat=False, system=None, history=(A,)) == tokenizer("hi")["input_ids"]


def test_a_conversation_that_exceeds_the_context_is_refused_with_a_hint(view: Screen) -> None:
    session = open_session(view, table_pair(max_position_embeddings=90))
    handled(session, "/length 4", "/turns on")
    assert session.handle("x" * 80) is Verdict.FAILED
    assert "90" in (message := view.take()[1]) and "/turns new" not in message
    handled(session, "x" * 20)
    assert session.handle("y" * 20) is Verdict.FAILED
    message = view.take()[1]
    assert "89" in message and "/turns new" in message and TURN_NOT_KEPT not in message
    handled(session, "/turns new", "y" * 20)


def test_a_conversation_that_exceeds_the_drafters_context_is_refused_too(view: Screen) -> None:
    pair = table_pair()
    pair.drafter = table_pair(max_position_embeddings=90).drafter
    session = open_session(view, pair)
    handled(session, "/length 4", "/turns on", "/drafter on", "x" * 20)
    view.take()
    assert session.handle("y" * 20) is Verdict.FAILED
    message = view.take()[1]
    assert all(part in message for part in ("90", "89", "/turns new", TURN_NOT_KEPT))


def test_other_models_start_a_new_conversation_and_a_failed_load_forgets_nothing(view: Screen) -> None:
    def load(request: Any, say: Any) -> SimpleNamespace:
        if "nowhere" in request.target:
            raise UserError("not there")
        return table_pair()

    session = open_session(view, load=load)
    handled(session, *START, "Hello", "And why?")
    assert session.handle("/load target=nowhere") is Verdict.FAILED and "forgotten" not in view.take()[1]
    assert len(session.harness.state.conversations) == 2
    handled(session, "/load target=there")
    assert CONVERSATION_ENDED.format("2 turns") in view.take()[1] and session.settings.turns
    handled(session, "Hello", "/load target=there")
    handled(session, "Hello")
    assert jobs_of(session)["target"].turn == 0
