"""The training text: pages of conversations that a target generates with itself, many at once, and their folders.

A conversation begins with the template up to the user's message. The target completes the message, the template ends
the turn and opens the answer, the target writes the answer, and so on. Template tokens are inserted, not sampled. So
are documents that the message is about: answers of earlier conversations, and parts of the Python reference. The
features that a drafter reads are hidden states of the same forward passes; nothing is computed for training only.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from utils.decode.engine_forward import engine_forward, prefill_pass
from utils.decode.features import FeatureReader
from utils.decode.sliding_window import empty_cache
from utils.engine import attention
from utils.files import replacing

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
            return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

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
        """A random task about a document of `size` tokens: some of the texts, or a part of REFERENCE.

        The message is complete if the task ends with the document or with a sentence.
        """
        document, source = list[int](), DOCUMENT
        if rng.random() < REFERENCE_TASKS:
            start = rng.randrange(max(1, len(REFERENCE) - CHARACTERS * size))
            document, source = [*self.encode(REFERENCE[start : start + CHARACTERS * size])], TEMPLATE
        while len(document) < size:
            document += (*rng.choice(texts), *self.encode("\n\n"))
        before, after = rng.choice(_lines("documents")).replace("\\n", "\n").split("{}")
        parts = ((self.encode(before), TEMPLATE), (document[:size], source), (self.encode(after), TEMPLATE))
        tokens = tuple((token, source) for part, source in parts for token in part)
        return Opening(tokens, complete=after[-1:] in ("", "."))


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
    names = ("open_ended", "queries", "problems", "translations")
    others = (tuple(line.replace("\\n", "\n") for line in _lines(name)) for name in names)
    return *others, questions, questions, requests, requests, _filled(_lines("code"), tasks)


def _filled(forms: list[str], words: list[str]) -> tuple[str, ...]:
    return tuple(form.format(word) if "{}" in form else f"{form} {word}" for form in forms for word in words)


def _lines(name: str) -> list[str]:
    return (OPENINGS / f"{name}.txt").read_text(encoding="utf-8").splitlines()


ANSWER_TEMPERATURES = (0.0, 1.0, 0.4, 0.0, 1.0, 0.7)  # by row in turn: drafters serve greedy and sampled decoding
SHARES = (8, 2, 8, 1)  # the lengths of conversations, by page in turn: the longest one divided by these
LONG_DOCUMENT, SHORT_DOCUMENT = (0.7, 0.85), (0.1, 0.5)  # size of a document relative to its conversation
SHORT_TASKS = 0.35  # of short conversations are about a document; all longer ones are
REFERENCE, REFERENCE_TASKS = "\n\n".join(topics.values()), 0.5  # text for documents, and the share that are parts of it
CHARACTERS = 8  # that have at least one token
MIN_LENGTH = 192  # of conversations, unless all are shorter
LEAST_TEXT = 24  # tokens of an answer that may become part of a document
PASS_TOKENS = 2048  # that are inserted in one pass: all hidden states of a pass are in memory


class TextPage(NamedTuple):
    """B conversations of T tokens.

    tokens (B, T) int32. features (B, T, F): hidden states at each position, ending with that after the target's final
    norm. sources (B, T): TEMPLATE, QUESTION, ANSWER or DOCUMENT. temperatures (B,): of the answers.
    """

    tokens: Tensor
    features: Tensor
    sources: Tensor
    temperatures: Tensor

    @property
    def generated(self) -> Tensor:
        """(B, T): True for tokens that the target generated, in this conversation or in an earlier one."""
        return self.sources != TEMPLATE

    @property
    def answers(self) -> Tensor:
        """(B, T): True for tokens of answers."""
        return self.sources == ANSWER

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """The answers as tuples of token ids, without the shortest ones and without end tokens."""
        found = []
        for tokens, answers in zip(self.tokens, self.answers, strict=True):
            starts = (answers.int().diff(prepend=torch.zeros(1)) != 0).nonzero()[:, 0].tolist()
            runs = tokens.tensor_split(starts)
            found += [
                tuple(run.tolist()[:-1])
                for run, is_answer in zip(runs, answers.tensor_split(starts), strict=True)
                if len(run) > LEAST_TEXT and is_answer[0]
            ]
        return found

    def rows(self, index: Tensor | slice, device: torch.device | None = None) -> TextPage:
        """A page of some of its rows, on `device`."""
        return TextPage(*(tensor[index].to(device) for tensor in self))


class Corpus:
    """The pages in a folder, one safetensors file each, numbered from 0. A page is written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        """The number of pages; their numbers have no gaps."""
        return len([*self._folder.glob("page-*.safetensors")])

    def add(self, page: TextPage) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with replacing(self._path(len(self))) as file:
            file.write(save(page._asdict()))

    def page(self, number: int) -> TextPage:
        """One page, memory-mapped."""
        return TextPage(**load_file(self._path(number)))

    def _path(self, number: int) -> Path:
        return self._folder / f"page-{number:05d}.safetensors"


class PageGenerator:
    """Generates pages with a target, in conversations of at most `length` tokens.

    layers: the hidden states that become features, see utils.decode.features. The last one must be -1.
    """

    def __init__(self, model: Any, script: Script, layers: tuple[int, ...], *, length: int) -> None:
        self._model, self._script, self._layers, self._length = model, script, layers, length
        self._passes: dict[int, float] = {}  # seconds, by number of rows
        if model.config._attn_implementation == "sdpa":
            _use_grouped_attention(model)

    def generate(
        self, seed: int, size: int, earlier: Corpus, *, on_tokens: Callable[[int], None] = lambda count: None
    ) -> TextPage:
        """The page of a seed after the `earlier` ones, whose answers become documents. It has about `size` tokens.

        on_tokens: called with the number of new tokens.
        """
        # Generators of their own, so that a page depends on its seed and the earlier pages alone.
        generator = torch.Generator(self._model.device).manual_seed(seed)
        rows, length = self._shape(size, len(earlier))
        conversations = self._conversations(random.Random(seed), rows, length, earlier)
        cache, reader = empty_cache(self._model), FeatureReader(self._model, self._layers)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        position, sampled = 0, [0] * len(conversations)  # placeholders: rows begin with tokens of the template
        with torch.no_grad(), reader.watching():
            # Every row gets equally many tokens per pass, inserted or one sampled, so nothing is padded.
            while position < length:
                inserted = min(len(row.inserted) for row in conversations)
                width = max(1, min(length - position, PASS_TOKENS // rows, inserted))
                pairs = zip(conversations, sampled, strict=True)
                block = torch.tensor([[row.next_token(token) for _ in range(width)] for row, token in pairs])
                tokens, sources = block.unbind(-1)
                arguments = {"past_key_values": cache, "use_cache": True, "output_hidden_states": True}
                # An engine computes no logits in a prefill, but those of the last position are sampled from.
                with prefill_pass(width > 1 and engine_forward(self._model) is None):
                    output = self._model(input_ids=tokens.to(self._model.device), logits_to_keep=1, **arguments)
                parts.append((tokens.int(), sources.byte(), reader.features(output).to("cpu", torch.bfloat16)))
                sampled = _sample(output.logits[:, -1], [row.temperature for row in conversations], generator)
                position += width
                on_tokens(tokens.numel())
        tokens, sources, features = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        return TextPage(tokens, features, sources, torch.tensor([row.answer_temperature for row in conversations]))

    def seconds(self, size: int, number: int) -> float:
        """The expected time of the page with this number: for each position a pass over one token of every row.

        Positions that are inserted together take less, and late ones of long conversations more.
        """
        rows, length = self._shape(size, number)
        return length * self._pass_seconds(rows)

    def seconds_of_all(self, size: int) -> float:
        """The expected time of pages with all lengths of conversations."""
        return sum(self.seconds(size, number) for number in range(len(SHARES)))

    def speed(self, size: int) -> float:
        """Operations per second of the passes of a page."""
        (rows, _), weights = self._shape(size, 0), sum(weight.numel() for weight in self._model.parameters())
        return float(2 * rows * weights) / self._pass_seconds(rows)

    def _pass_seconds(self, rows: int) -> float:
        """The time of the second of two passes over one token of every row."""
        if rows not in self._passes:
            tokens = torch.zeros((rows, 1), dtype=torch.long, device=self._model.device)
            for _ in range(2):
                started = time.monotonic()
                with torch.no_grad():
                    self._model(input_ids=tokens, use_cache=False).logits.sum().item()  # waits for a GPU
                self._passes[rows] = time.monotonic() - started
        return self._passes[rows]

    def _shape(self, size: int, number: int) -> tuple[int, int]:
        """The rows of the page with this number, and their length."""
        share = 1 if self._script.complete else SHARES[number % len(SHARES)]  # a question may fill a short one
        length = max(min(MIN_LENGTH, self._length), self._length // share)
        return max(1, size // length), length

    def _conversations(self, rng: random.Random, count: int, length: int, earlier: Corpus) -> list[Conversation]:
        """Long ones about documents, and short ones of which some are. Questions from a file have none."""
        short = [number for number in range(len(earlier)) if SHARES[number % len(SHARES)] == max(SHARES)]
        texts = earlier.page(rng.choice(short)).texts if short and not self._script.complete else []
        is_short, conversations = length < self._length // 2, []
        for row in range(count):
            opening = self._script.draw_opening(rng)
            if texts and not (is_short and rng.random() > SHORT_TASKS):
                share = rng.uniform(*(SHORT_DOCUMENT if is_short else LONG_DOCUMENT))
                opening = self._script.draw_task(rng, texts, int(share * length))
            temperature = ANSWER_TEMPERATURES[row % len(ANSWER_TEMPERATURES)]
            conversations.append(Conversation(self._script, temperature, opening))
        return conversations


def _use_grouped_attention(model: Any) -> None:
    """Process query heads that share keys together, which is four times as fast, if the model's attention allows it."""
    model.set_attn_implementation(attention.NAME)
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)
    except NotImplementedError:  # soft-capping, attention sinks or a bias
        model.set_attn_implementation("sdpa")


def _sample(logits: Tensor, temperatures: Sequence[float], generator: torch.Generator) -> list[int]:
    """One token per row of logits (B, V); temperature 0 is greedy."""
    tokens = logits.argmax(-1)
    scale = torch.tensor(temperatures, device=logits.device)[:, None]
    drawn = (scale > 0)[:, 0]
    if bool(drawn.any()):
        probs = (logits[drawn].float() / scale[drawn]).softmax(-1)
        tokens[drawn] = torch.multinomial(probs, 1, generator=generator)[:, 0]
    return tokens.tolist()
