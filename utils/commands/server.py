"""/server: finds the subcommand, and adds, lists and removes servers without contacting them.

A new subcommand is one row of the table.
"""

from collections.abc import Callable, Mapping

from utils.commands.servers.server_doctor import doctor
from utils.commands.servers.server_load import load
from utils.commands.servers.server_start import start
from utils.commands.servers.server_text import text
from utils.commands.shared.registry import Command, CommandContext, Outcome, Reply, ShowRows, UseServers
from utils.errors import check_choice
from utils.servers.address import ADD_EXAMPLE, checked, key_headers, parse_server, without_server

HEADINGS = ("server", "URL", "model", "baseline", "key")
NONE = f"There is no server; add one, for example: {ADD_EXAMPLE}"
IN_CLEAR = "The key will cross the network without encryption: use an https:// address if the server has one."


def add(argument: str, context: CommandContext) -> Outcome:
    added = parse_server(argument)
    key_headers(added.key)  # raises UserError for an unset variable, while the user can still correct it
    addresses = checked([*context.harness.state.servers.addresses, added])
    compared = "" if added.baseline is None else f", compared with {added.baseline}"
    replies = [Reply(f"server {added.name} at {added.url}{compared}: every prompt is sent to it from now on")]
    return [UseServers(addresses), *replies, *([Reply(IN_CLEAR)] if added.sends_key_in_clear else [])]


def show(argument: str, context: CommandContext) -> Outcome:
    addresses = context.harness.state.servers.addresses
    if not addresses:
        return [Reply(NONE)]
    local = context.harness.state.servers.local
    ended = [name for name in local.names() if name not in local]
    rows = []
    for address in addresses:
        state, key = " (it has ended)" * (address.name in ended), "-" if address.key is None else f"${address.key}"
        model, baseline = address.model or "its only one", address.baseline or "-"
        rows.append((address.name, address.url + state, model, baseline, key))
    return [ShowRows(rows, HEADINGS)]


def remove(argument: str, context: CommandContext) -> Outcome:
    addresses = context.harness.state.servers.addresses
    left = without_server(addresses, argument)
    freed = [address.name for address in addresses if address.baseline == argument]
    note = f"; {' and '.join(freed)} now without a baseline" if freed else ""
    return [UseServers(left), Reply(f"server {argument} removed{note}")]


def stop(argument: str, context: CommandContext) -> Outcome:
    context.harness.state.servers.local.launch_of(argument)  # raises UserError for a server that was not started here
    return remove(argument, context)


LIST = "list"
SUBCOMMANDS: Mapping[str, tuple[Callable[[str, CommandContext], Outcome], str, str]] = {
    "add": (
        add,
        "add NAME URL [model=...] [key=VARIABLE] [baseline=NAME] [same=NAME] [timeout=S] [ca=FILE] "
        "[omit=FIELD] [rename=FIELD:NAME]",
        "a server by its name and address",
    ),
    LIST: (show, "[list]", "the servers of this session"),
    "remove": (remove, "remove NAME", "a server"),
    "text": (
        text,
        "text NAME [FILE] [repeats=3] [concurrency=4] [limit=4]",
        "is its greedy text that of its baseline?",
    ),
    "doctor": (
        doctor,
        "doctor NAME [FILE] [expect=FILE] [prompts=12] [long=1024]",
        "does it accept as many drafts as it should, and if not, why?",
    ),
    "start": (
        start,
        "start llama.cpp|vllm [TARGET] [drafter=MODEL|ngram] [draft=N] [name=...] [baseline=NAME] [-- FLAGS]",
        "a server program of a kind that is installed here",
    ),
    "stop": (stop, "stop NAME", "a server that was started"),
    "load": (
        load,
        "load NAME [FILE] [concurrency=1,2,4 | rate=2/s] [draft=0,1,3,5] [requests=N] [turns=N] "
        "[length=N | fixed=N] [seconds=N] [ttft=500ms] [tpot=50ms] [cache=on]",
        "many requests at the same time",
    ),
}


def _server(argument: str, context: CommandContext) -> Outcome:
    name, _, rest = argument.partition(" ")
    name = check_choice(name.lower() or LIST, tuple(SUBCOMMANDS), "subcommand")
    return SUBCOMMANDS[name][0](rest.strip(), context)


SERVER = Command(
    "server",
    "add NAME URL",
    "compare inference servers",
    _server,
    group="models",
    about="Servers with an OpenAI-compatible interface answer every prompt too: vLLM, SGLang, llama.cpp and others. A "
    "speed-up is given against the baseline that is named. key= is the name of an environment variable.",
    example=("> /server add spec http://127.0.0.1:8001", "server spec at http://127.0.0.1:8001"),
    syntax=tuple(f"/server {syntax}" for _, syntax, _ in SUBCOMMANDS.values()),
    words={name: meaning for name, (_, _, meaning) in SUBCOMMANDS.items()},
)
