"""Where in an answer drafts are accepted: in text that is copied or new, in reasoning or the answer, in code or prose.

A draft belongs to the kinds of the token that the answer has at its position. So a rejected draft counts where it
should have continued the answer.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from utils.decode.steps import Step

COPIED_TOKENS = 4  # a token is copied if it ends an n-gram of this many tokens that the text before it contains
TEMPLATE_END = 16  # tokens at the end of a prompt in which a chat template may begin the reasoning
THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
FENCE = re.compile(r"^[ \t]*```.*?(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
KINDS = (("copied", "new"), ("thinking", "answer"), ("code", "prose"))


def spans_of(prompt: Sequence[int], steps: Sequence[Step], tokenizer: Any) -> dict[str, list[int]]:
    """[accepted, drafted] by kind of text, for kinds with drafts. A pair of KINDS is left out if the text has nothing of
    its first kind.
    """
    tokens = [token for step in steps for token in step.tokens]
    inside = _copied(prompt, tokens), *_marked(prompt, tokens, tokenizer)
    counts: dict[str, list[int]] = {}
    for names, flags in zip(KINDS, inside, strict=True):
        if any(flags):
            counts |= {name: [0, 0] for name in names if (name == names[0]) in flags}
            start = 0
            for step in steps:
                for index in range(len(step.drafted)):
                    # Drafts may reach beyond the end of the answer.
                    count = counts[names[not flags[min(start + index, len(flags) - 1)]]]
                    count[0] += index < step.accepted
                    count[1] += 1
                start += len(step.tokens)
    return {name: count for name, count in counts.items() if count[1]}


def _copied(prompt: Sequence[int], tokens: Sequence[int]) -> list[bool]:
    text, seen, found = [*prompt, *tokens], set[tuple[int, ...]](), []
    for end in range(1, len(text) + 1):
        gram = tuple(text[max(0, end - COPIED_TOKENS) : end])
        found.append(gram in seen)
        if len(gram) == COPIED_TOKENS:
            seen.add(gram)
    return found[len(prompt) :]


def _marked(prompt: Sequence[int], tokens: Sequence[int], tokenizer: Any) -> Iterable[list[bool]]:
    """Whether each token lies between the marks of reasoning, and of code, which belong to it."""
    pieces = tokenizer.batch_decode([[token] for token in tokens], clean_up_tokenization_spaces=False)
    opened = str(tokenizer.decode(list(prompt[-TEMPLATE_END:]))).rstrip().endswith("<think>")
    for pattern, opening in ((THINK, "<think>" * opened), (FENCE, "")):
        spans = [match.span() for match in pattern.finditer(opening + "".join(pieces))]
        start, flags = len(opening), []
        for piece in pieces:
            # The middle of a token, which may hold a mark and characters around it.
            middle = start + len(piece) / 2
            flags.append(any(low <= middle < high for low, high in spans))
            start += len(piece)
        yield flags
