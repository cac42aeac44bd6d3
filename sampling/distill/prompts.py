"""Beginnings of user messages for the target to complete. Small models alone cover few subjects and seldom code.

A group is drawn first, then one of its texts, so a group that is listed twice has twice the share.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("openings")
OPEN_ENDED = (
    *[""] * 6,
    "Explain",
    "What is",
    "What are",
    "Who",
    "Where",
    "When did",
    "Why",
    "How do I",
    "How does",
    "How many",
    "Can you",
    "Write a short story about",
    "Write a poem about",
    "Write an email to",
    "Write a blog post",
    "Give me a list of",
    "Compare",
    "Write a Python function that",
    "Write a Python function",
    "Write a Python class",
    "Write a function in JavaScript that",
    "Write a SQL query",
    "Fix this code:\n\ndef",
    "What does this code do?\n\n",
    "Write a C++ program",
    "Write a bash script that",
    "Implement",
    "Solve this problem step by step:",
    "Summarize this text:\n\n",
    "Rewrite this paragraph:\n\n",
    "Translate to English:",
    "Correct the grammar:",
    "A shop sells",
    "Tell me",
    "Describe",
    "I want to",
    "Is it true that",
    "Name three",
    "Create a table of",
)


def openings() -> tuple[tuple[str, ...], ...]:
    """Groups of opening texts. The subject goes where a form has "{}", otherwise to the end."""
    subjects, tasks = _lines("subjects"), _lines("tasks")
    questions, requests = _filled(_lines("questions"), subjects), _filled(_lines("requests"), subjects)
    return OPEN_ENDED, questions, questions, requests, requests, _filled(_lines("code"), tasks)


def _filled(forms: list[str], words: list[str]) -> tuple[str, ...]:
    return tuple(form.format(word) if "{}" in form else f"{form} {word}" for form in forms for word in words)


def _lines(name: str) -> list[str]:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
