"""/server: finds the subcommand. A new subcommand is one row of the table."""

from collections.abc import Callable, Mapping

from utils.commands.outcomes import Outcome
from utils.commands.registry import Command, CommandContext, Page
from utils.commands.servers.add import add, remove, show
from utils.commands.servers.load import load
from utils.commands.servers.start import start, stop
from utils.commands.servers.sweep import sweep
from utils.commands.servers.text import text
from utils.errors import check_choice

LIST = "list"
SUBCOMMANDS: Mapping[str, Callable[[str, CommandContext], Outcome]] = {
    "add": add,
    LIST: show,
    "remove": remove,
    "text": text,
    "start": start,
    "stop": stop,
    "sweep": sweep,
    "load": load,
}
SYNTAX = (
    "/server add NAME URL [model=...] [key=VARIABLE] [baseline=NAME] [timeout=SECONDS]",
    "/server [list]",
    "/server remove NAME",
    "/server text NAME [FILE] [repeats=3] [concurrency=4] [limit=4] [samples=24]",
    "/server start llama.cpp|vllm|sglang|transformers [TARGET] [drafter=MODEL|ngram] [draft=N] [name=...] "
    "[baseline=NAME] [-- FLAGS]",
    "/server stop NAME",
    "/server sweep NAME draft=0,2,4,8 [repeats=N]",
    "/server load NAME [concurrency=1,2,4] [requests=N] [turns=N] [length=N] [seconds=N]",
)
MEANINGS = {
    "add": "a server by its name and address",
    LIST: "the servers of this session",
    "remove": "a server",
    "text": "is its text that of its baseline? (sampled ones if /temperature is above 0)",
    "start": "an engine that is installed here",
    "stop": "a server that was started",
    "sweep": "draft lengths of a started server",
    "load": "many requests at the same time",
}


def _server(argument: str, context: CommandContext) -> Outcome:
    name, _, rest = argument.partition(" ")
    name = check_choice(name.lower() or LIST, tuple(SUBCOMMANDS), "subcommand")
    return SUBCOMMANDS[name](rest.strip(), context)


SERVER = Command(
    "server",
    "add NAME URL",
    "compare inference servers",
    _server,
    group="models",
    page=Page(
        "Servers with an OpenAI-compatible interface answer every prompt too: vLLM, SGLang, llama.cpp and others. A "
        "speed-up is given against the baseline that is named. key= is the name of an environment variable.",
        ("> /server add spec http://127.0.0.1:8001", "server spec at http://127.0.0.1:8001"),
        SYNTAX,
        ("race", "speed-up"),
    ),
    words=tuple(SUBCOMMANDS),
    meanings=MEANINGS,
)
