"""Beginnings of users' turns. Left to itself a small model asks about few things, and hardly ever for code.

A group is drawn first, so that the shares are those of `openings`, then one of its texts. The target finishes the sentence.
"""

from __future__ import annotations

from pathlib import Path

FREE = (
    *("", "", "", "", "", ""),
    *(
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
    ),
    *(
        "Write a short story about",
        "Write a poem about",
        "Write an email to",
        "Write a blog post",
        "Give me a list of",
        "Compare",
    ),
    *(
        "Write a Python function that",
        "Write a Python function",
        "Write a Python class",
        "Write a function in JavaScript that",
    ),
    *(
        "Write a SQL query",
        "Fix this code:\n\ndef",
        "What does this code do?\n\n",
        "Write a C++ program",
        "Write a bash script that",
    ),
    *(
        "Implement",
        "Solve this problem step by step:",
        "Summarize this text:\n\n",
        "Rewrite this paragraph:\n\n",
        "Translate to English:",
    ),
    *(
        "Correct the grammar:",
        "A shop sells",
        "Tell me",
        "Describe",
        "I want to",
        "Is it true that",
        "Name three",
        "Create a table of",
    ),
)
QUESTIONS = (
    *(
        "What is {}",
        "What are the main facts about {}",
        "What do you know about {}",
        "What is the history of {}",
        "What makes {}",
    ),
    *(
        "What is the difference between {} and",
        "Why is {}",
        "Why do people",
        "How does {}",
        "How do I",
        "How did {}",
        "How many",
    ),
    *(
        "How much",
        "Who invented",
        "Who was",
        "Where is",
        "Where does",
        "When did",
        "When was",
        "Which",
        "Is it true that {}",
    ),
    *(
        "Does {}",
        "Can {}",
        "Can you explain {}",
        "I am interested in {}.",
        "In one sentence, what is {}",
        "What happened to",
    ),
    *("Name three", "Who is the most famous"),
)
REQUESTS = (
    *(
        "Explain {}",
        "Explain to a child",
        "Tell me about {}",
        "Describe {}",
        "Give me five tips about {}",
        "Give me a list of",
    ),
    *("Compare {}", "Write a short story about {}", "Write a poem about {}", "Write a blog post about {}"),
    *(
        "Write an email about {}",
        "Write a song about",
        "Summarize the history of {}",
        "Write a short paragraph about {}",
    ),
    *(
        "Write a dialogue about {}",
        "Suggest a title for a book about {}",
        "I need help with {}.",
        "What should I know about {}",
    ),
    *(
        "Help me plan",
        "Give me advice about {}",
        "Discuss the advantages of {}",
        "Argue",
        "Make a plan for",
        "Pretend that you are",
    ),
    *("Imagine", "Describe a day", "Write a review of", "Write a speech about {}", "Recommend"),
)
CODE = (
    *("Write a Python function that {}", "Write a function in Python that {}", "Write a Python program that {}"),
    *("Show me Python code that {}", "Write a JavaScript function that {}", "Write a C++ program that {}"),
    *(
        "Write a Java method that {}",
        "Write a bash script that {}",
        "How do I write code that {}",
        "Write a Rust function that {}",
    ),
    *("Write a Go function that {}", "Write a class in Python that {}"),
)


def openings() -> tuple[tuple[str, ...], ...]:
    """Groups of texts; a form without a place for its subject is followed by it."""
    subjects, tasks = _lines("subjects.txt"), _lines("tasks.txt")
    questions, requests, code = (
        _filled(*pair) for pair in ((QUESTIONS, subjects), (REQUESTS, subjects), (CODE, tasks))
    )
    return FREE, questions, questions, requests, requests, code


def _filled(forms: tuple[str, ...], words: list[str]) -> tuple[str, ...]:
    return tuple(form.format(word) if "{}" in form else f"{form} {word}" for form in forms for word in words)


def _lines(name: str) -> list[str]:
    return Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
