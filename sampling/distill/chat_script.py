"""Conversations that a target writes by itself: the chat template's own pieces, and who is speaking in each row of a batch.

A row begins with the template up to the user's words; the target writes them, the template ends that turn and opens the answer, the
target writes that, and so on. What the template puts there is forced; everything else is the target's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from sampling.distill.prompts import openings

# Stand for what is said; letters only, so that no template trims or escapes them.
FIRST, ANSWER, SECOND = "FIRSTMARK", "ANSWERMARK", "SECONDMARK"
FORCED, ASKED, ANSWERED = range(3)  # whose token it is: the template's, or the target's as a user or in an answer
LONGEST_QUESTION = 96  # tokens; a small model may never end a question
QUESTION_WARMTH = 0.7  # greedily there would be one question only; at 1 a small model asks nonsense


@dataclass(frozen=True, slots=True)
class Script:
    """Token ids that a chat template puts before a user's first words, between them and the answer, and behind that; what ends a turn.

    Of a model without a template there is only a first token and text: both links are empty. openings: groups of texts, see
    sampling.distill.prompts; ids: of a text.
    """

    head: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_question: tuple[int, ...]
    end_ids: frozenset[int]
    openings: tuple[tuple[str, ...], ...]
    ids: Callable[[str], tuple[int, ...]]

    @classmethod
    def of(cls, tokenizer: Any, end_ids: frozenset[int], questions: list[str]) -> Script:
        """questions: whole users' turns to take in place of openings."""

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

        groups = (tuple(questions),) if questions else openings()
        turns = (
            {"role": "user", "content": FIRST},
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": SECOND},
        )
        try:
            text: str = tokenizer.apply_chat_template(list(turns), tokenize=False)
            head, rest = text.split(FIRST)
            to_answer, rest = rest.split(ANSWER)
            return cls(ids(head), ids(to_answer), ids(rest.split(SECOND)[0]), end_ids, groups, ids)
        except (TemplateError, TypeError, ValueError, AttributeError):
            first = next((token for token in (tokenizer.bos_token_id, *sorted(end_ids)) if token is not None), 0)
            return cls((first,), (), (first,), end_ids, groups, ids)

    def opening(self, chance: random.Random) -> tuple[int, ...]:
        """One of them, its group drawn first."""
        return self.ids(chance.choice(chance.choice(self.openings)))


@dataclass(slots=True)
class Speaker:
    """One row: what is still to be forced, and whether the target is answering.

    warmth: the temperature of its answers. asked: whether the question was given whole.
    """

    script: Script
    warmth: float
    opening: tuple[int, ...]
    asked: bool = False
    answering: bool = False
    spoken: int = 0
    forced: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forced = [*self.script.head, *self.opening]
        if not self.script.to_answer:
            self.answering = True  # all is text
        elif self.asked:
            self._turn(answering=True)

    @property
    def temperature(self) -> float:
        """Of the next token."""
        return self.warmth if self.answering else QUESTION_WARMTH

    def next(self, drawn: int) -> tuple[int, int]:
        """The row's next token, given what the target drew, and whose it is."""
        if self.forced:
            return self.forced.pop(0), FORCED
        self.spoken += 1
        voice = ANSWERED if self.answering else ASKED
        ended = drawn in self.script.end_ids
        if not self.answering and (ended or self.spoken > LONGEST_QUESTION):
            self._turn(answering=True)
            return self.forced.pop(0), FORCED
        if ended:
            self._turn(answering=not self.script.to_answer)
            if self.forced and self.forced[0] == drawn:  # the template writes the end itself
                del self.forced[0]
        return drawn, voice

    def _turn(self, *, answering: bool) -> None:
        self.answering, self.spoken = answering, 0
        self.forced += self.script.to_answer if answering and self.script.to_answer else self.script.to_question
