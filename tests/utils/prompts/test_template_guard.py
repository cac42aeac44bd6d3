"""Chat templates have bounds: time, memory and the size of their text; ordinary ones are not affected."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from test_chat_template import NO_SYSTEM, model_ending_at, tokenizer_with
from transformers.utils.chat_template_utils import _compile_jinja_template

from utils.errors import UserError
from utils.prompts import template_guard
from utils.prompts.chat_template import end_ids, prompt_ids
from utils.prompts.template_guard import GUARD, check_rendering
from utils.prompts.template_process import environment

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loop": (LOOP, "seconds"),
    "one call": ("{{ (1).to_bytes(10**10) }}", "memory"),
    "power": ("{{ messages[0].content|length ** (10 ** 9) }}", "seconds|memory"),
    "constant": ("{{ 10 ** (10 ** 8) }}", "seconds|memory"),
    "doubling": (
        "{% set s = namespace(x='xx') %}{% for a in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
        "memory",
    ),
    "format": ("{{ '{:>9999999999}'.format(1) }}", "memory"),
    "filter": ("{{ 'x'|center(9999999999) }}", "memory"),
    "much text": ("{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "characters"),
    "short text": ("{% for a in range(200) %}{{ 'x' * 9999 }}{% endfor %}", "characters"),
    "only with an answer": ("{% if messages|length > 1 %}" + LOOP + "{% endif %}{{ messages[0].content }}", None),
}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One second instead of two."""
    monkeypatch.setattr(template_guard, "SECONDS", 1)
    GUARD.close()
    yield
    GUARD.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_without_an_end_is_refused(name: str) -> None:
    template, reason = HOSTILE[name]
    tokenizer = tokenizer_with(template)
    assert end_ids(model_ending_at(None), tokenizer) == {tokenizer.eos_token_id}
    if reason is None:
        assert prompt_ids(tokenizer, "x", chat=True, system=None)
        return
    with pytest.raises(UserError, match=f"({reason}).*/chat off"):
        prompt_ids(tokenizer, "hello", chat=True, system=None)
    # The next template is tried out in a new process.
    assert prompt_ids(tokenizer_with(NO_SYSTEM), "x", chat=True, system=None)


def test_the_memory_of_this_process_is_not_used() -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ("one call", "doubling", "format"):
        with pytest.raises(UserError):
            prompt_ids(tokenizer_with(HOSTILE[name][0]), "hello", chat=True, system=None)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_long_prompts_are_not_refused() -> None:
    messages = [{"role": "user", "content": "a\n\u2028🙂" * 400_000}]
    check_rendering(NO_SYSTEM, messages, {}, add_generation_prompt=True)
    assert GUARD._running() is not None  # rendered there, and the process has not been ended by a limit


def test_templates_of_transformers_run_in_the_process() -> None:
    """A template that fails there would not be bounded here."""
    theirs: Any = _compile_jinja_template("").environment
    ours = environment()
    for part in ("filters", "tests", "globals"):
        assert set(getattr(ours, part)) == set(getattr(theirs, part)), part

    def tags(one: Any) -> set[str]:
        return {tag for extension in one.extensions.values() for tag in extension.tags}

    assert tags(ours) == tags(theirs)
    source = "{% generation %}{{ messages|tojson(indent=2) }}{% break %}{% endgeneration %}".replace("{% break %}", "")
    assert ours.from_string(source).render(messages=["é"]) == theirs.from_string(source).render(messages=["é"])


def test_ctrl_c_ends_a_rendering() -> None:
    check_rendering("", [], {}, add_generation_prompt=False)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        check_rendering(LOOP, [], {}, add_generation_prompt=False)
    assert GUARD._process is None
    check_rendering("x", [], {}, add_generation_prompt=False)


def test_a_killed_process_is_replaced() -> None:
    check_rendering("x", [], {}, add_generation_prompt=False)
    assert GUARD._process is not None
    GUARD._process.kill()
    GUARD._process.wait()
    check_rendering("x", [], {}, add_generation_prompt=False)


def test_a_rendering_ends_although_its_signal_is_ignored_and_blocked_by_who_starts_the_process() -> None:
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    try:
        GUARD.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGPROF, before)
    with pytest.raises(template_guard.TemplateLimitError, match="seconds"):
        check_rendering(LOOP, [], {}, add_generation_prompt=True)
