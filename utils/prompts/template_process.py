"""A process that tries out chat templates for `template_guard`: requests as JSON lines in, verdicts as JSON lines out.

Nothing inside a Python process can stop `{{ 10**10**8 }}` or bound the memory of one call, but the system can: this
process has a limit of memory and, for each request, of processor time. It imports jinja2 alone, so it starts fast.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any

import jinja2.ext
import jinja2.nodes
from jinja2 import Template, TemplateError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TOO_LARGE = 3  # exit status


class Generation(jinja2.ext.Extension):
    """The `generation` block of transformers, which marks the text of the assistant."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("content")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def content(self, caller: Any) -> Any:
        return caller()


def environment() -> ImmutableSandboxedEnvironment:
    """The environment in which transformers renders templates; a test compares them."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)


def set_limits(memory: int) -> None:
    """Limit the memory of this process, on systems that can."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def let_timer_end_process() -> None:
    """Undo an ignored or blocked signal of the timer, which a process inherits from the one that starts it."""
    with suppress(AttributeError, ValueError, OSError):  # systems without this timer
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})


def answer(request: dict[str, Any], templates: dict[str, Template]) -> dict[str, Any]:
    """Render a template, and report the size of the text or the error."""
    source, limit = request["template"], request["size"]
    size = 0
    try:
        if source not in templates:
            templates.clear()
            templates[source] = environment().from_string(source)
        for part in templates[source].generate(**request["variables"]):
            size += len(part)
            if size > limit:
                break
    except MemoryError:
        os._exit(TOO_LARGE)
    except Exception as error:  # transformers will raise it again
        return {"error": type(error).__name__}
    return {"size": size}


def main() -> None:
    """Answer requests until the input ends. The arguments are bytes of memory and seconds of processor time."""
    memory, seconds = map(int, sys.argv[1:])
    set_limits(memory)
    let_timer_end_process()
    timer = getattr(signal, "setitimer", lambda *_: None)
    templates: dict[str, Template] = {}
    for line in sys.stdin.buffer:
        # Its signal ends the process. It counts processor time, so that a busy machine makes no difference.
        timer(getattr(signal, "ITIMER_PROF", 0), seconds)
        reply = answer(json.loads(line), templates)
        timer(getattr(signal, "ITIMER_PROF", 0), 0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
