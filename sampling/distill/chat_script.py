"""Conversations that a target generates by itself: the parts of its chat template, and the state of a conversation.

A conversation begins with the template up to the user's message. The target completes the message, the template ends
the turn and opens the answer, the target writes the answer, and so on. Template tokens are inserted, not sampled. So
are documents: answers of earlier conversations that the message is about.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OPENINGS = Path(__file__).with_name("openings")
# Placeholders for message contents. They are letters only, so that no template trims or escapes them.
FIRST_QUESTION, FIRST_ANSWER, SECOND_QUESTION = "FIRSTMARK", "ANSWERMARK", "SECONDMARK"
TEMPLATE, QUESTION, ANSWER, DOCUMENT = range(4)  # the source of a token; stored in the pages
MAX_QUESTION_TOKENS = 96  # a small model may never end a question
QUESTION_TEMPERATURE = 0.7  # greedy decoding would give one question only, and at 1 a small model asks nonsense


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a user message, or all of it if it is `complete`: token ids with their sources."""

    tokens: tuple[tuple[int, int], ...] = ()
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Script:
    """The token ids of a chat template around the messages, the end tokens, and the openings by group. Openings are
    `complete` messages if they come from a file.

    Without a chat template the prefix and the question prefix are one start token and the answer prefix is empty.
    """

    prefix: tuple[int, ...]
    answer_prefix: tuple[int, ...]
    question_prefix: tuple[int, ...]
    end_ids: frozenset[int]
    openings: tuple[tuple[str, ...], ...]
    complete: bool
    encode: Callable[[str], tuple[int, ...]]

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, end_ids: frozenset[int], questions: list[str]) -> Script:
        """The script of a tokenizer. `questions`, if any, are complete user messages that replace the openings."""

        def encode(text: str) -> tuple[int, ...]:
            # The template writes special tokens itself; the tokenizer would add a second first token.
            return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

        groups, complete = ((tuple(questions),), True) if questions else (openings(), False)
        messages = [
            {"role": "user", "content": FIRST_QUESTION},
            {"role": "assistant", "content": FIRST_ANSWER},
            {"role": "user", "content": SECOND_QUESTION},
        ]
        try:
            text: str = tokenizer.apply_chat_template(messages, tokenize=False)
            # Unpacking raises ValueError unless each mark occurs exactly once.
            prefix, rest = text.split(FIRST_QUESTION)
            answer_prefix, rest = rest.split(FIRST_ANSWER)
            question_prefix = rest.split(SECOND_QUESTION)[0]
            return cls(
                encode(prefix), encode(answer_prefix), encode(question_prefix), end_ids, groups, complete, encode
            )
        except Exception:  # no template, or one that fails or changes the contents
            start = next((token for token in (tokenizer.bos_token_id, *sorted(end_ids)) if token is not None), 0)
            return cls((start,), (), (start,), end_ids, groups, complete, encode)

    def draw_opening(self, rng: random.Random) -> Opening:
        """A random opening; the group is drawn first."""
        text = rng.choice(rng.choice(self.openings))
        return Opening(tuple((token, TEMPLATE) for token in self.encode(text)), self.complete)

    def draw_task(self, rng: random.Random, texts: Sequence[tuple[int, ...]], size: int) -> Opening:
        """A random task about a document of `size` tokens, which consists of some of the texts.

        If the task ends with the document, the message is complete.
        """
        document: list[int] = []
        while len(document) < size:
            document += (*rng.choice(texts), *self.encode("\n\n"))
        before, after = rng.choice(_lines("documents")).replace("\\n", "\n").split("{}")
        parts = ((self.encode(before), TEMPLATE), (document[:size], DOCUMENT), (self.encode(after), TEMPLATE))
        tokens = tuple((token, source) for part, source in parts for token in part)
        return Opening(tokens, complete=after[-1:] not in (":", ","))


@dataclass(slots=True)
class Conversation:
    """One row of a batch: which tokens are still inserted, with their sources, and whether the target is answering.

    `turn_tokens` counts the sampled tokens of the turn.
    """

    script: Script
    answer_temperature: float
    opening: Opening
    answering: bool = False
    turn_tokens: int = 0
    inserted: deque[tuple[int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._insert(self.script.prefix)
        self.inserted += self.opening.tokens
        if not self.script.answer_prefix:
            self.answering = True  # without a template all text counts as an answer
        elif self.opening.complete:
            self._start_turn(answering=True)

    @property
    def temperature(self) -> float:
        """The temperature at which the next token is sampled."""
        return self.answer_temperature if self.answering else QUESTION_TEMPERATURE

    def next_token(self, sampled: int) -> tuple[int, int]:
        """The next token of the row and its source, after the target has sampled a token."""
        if self.inserted:
            return self.inserted.popleft()
        self.turn_tokens += 1
        source = ANSWER if self.answering else QUESTION
        ended = sampled in self.script.end_ids
        # The end token of a question is dropped, because the template writes its own before the answer.
        if not self.answering and (ended or self.turn_tokens > MAX_QUESTION_TOKENS):
            self._start_turn(answering=True)
            return self.inserted.popleft()
        if ended:
            self._start_turn(answering=not self.script.answer_prefix)
            if self.inserted and self.inserted[0][0] == sampled:  # the template writes the end token itself
                self.inserted.popleft()
        return sampled, source

    def _start_turn(self, *, answering: bool) -> None:
        self.answering, self.turn_tokens = answering, 0
        has_template = bool(self.script.answer_prefix)
        self._insert(self.script.answer_prefix if answering and has_template else self.script.question_prefix)

    def _insert(self, tokens: Sequence[int]) -> None:
        self.inserted += [(token, TEMPLATE) for token in tokens]


def openings() -> tuple[tuple[str, ...], ...]:
    """Groups of beginnings of user messages: small models alone cover few subjects and seldom code.

    A group is drawn first, then one of its texts, so a group that is listed twice has twice the share. The subject goes
    where a form has "{}", otherwise to the end.
    """
    subjects, tasks = _lines("subjects"), _lines("tasks")
    questions, requests = _filled(_lines("questions"), subjects), _filled(_lines("requests"), subjects)
    open_ended = tuple(line.replace("\\n", "\n") for line in _lines("open_ended"))
    return open_ended, questions, questions, requests, requests, _filled(_lines("code"), tasks)


def _filled(forms: list[str], words: list[str]) -> tuple[str, ...]:
    return tuple(form.format(word) if "{}" in form else f"{form} {word}" for form in forms for word in words)


def _lines(name: str) -> list[str]:
    return (OPENINGS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
