"""Where in an answer drafts are accepted: in text that is copied or new, in thinking or the answer, in code or prose.

A draft belongs to the kinds of the token that the answer has at its position, whether it is accepted or not.
"""

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from utils.decode.steps import Step

COPIED_TOKENS = 4  # a token is copied if it ends this many tokens that the text before it contains, too
TEMPLATE_END = 16  # tokens at the end of a prompt in which a chat template may begin the thinking
THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
CODE = re.compile(r"^[ \t]*```.*?(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def spans_of(prompt: Sequence[int], steps: Sequence[Step], tokenizer: Any) -> dict[str, list[int]]:
    """[accepted, drafted] by kind of text, for kinds with drafts. Only where the first kind of a pair occurs."""
    tokens = [token for step in steps for token in step.tokens]
    pieces = tokenizer.batch_decode([[token] for token in tokens], clean_up_tokenization_spaces=False)
    opened = str(tokenizer.decode(list(prompt[-TEMPLATE_END:]))).rstrip().endswith("<think>")
    starts = [*accumulate((len(step.tokens) for step in steps[:-1]), initial=0)] if steps else []
    counts: dict[str, list[int]] = {}
    for names, flags in (
        (("copied", "new"), _copied(prompt, tokens)),
        (("thinking", "answer"), _inside(THINKING, pieces, "<think>" * opened)),
        (("code", "prose"), _inside(CODE, pieces)),
    ):
        for start, step in zip(starts, steps, strict=True) if any(flags) else ():
            for index in range(len(step.drafted)):
                # Drafts may reach beyond the end of the answer.
                count = counts.setdefault(names[not flags[min(start + index, len(flags) - 1)]], [0, 0])
                count[0] += index < step.accepted
                count[1] += 1
    return counts


def _copied(prompt: Sequence[int], tokens: Sequence[int]) -> list[bool]:
    text, seen, found = [*prompt, *tokens], set[tuple[int, ...]](), []
    for end in range(1, len(text) + 1):
        gram = tuple(text[max(0, end - COPIED_TOKENS) : end])
        found.append(gram in seen)
        seen |= {gram} if len(gram) == COPIED_TOKENS else set()
    return found[len(prompt) :]


def _inside(pattern: re.Pattern[str], pieces: Sequence[str], opening: str = "") -> list[bool]:
    """Whether the middle of each token is in a part of the text that matches, with its marks."""
    spans, start, flags = [match.span() for match in pattern.finditer(opening + "".join(pieces))], len(opening), []
    for piece in pieces:
        flags.append(any(low <= start + len(piece) / 2 < high for low, high in spans))
        start += len(piece)
    return flags
