"""/server: finds the subcommand, adds, lists and removes servers without contacting them, and starts local ones.

A new subcommand is one row of the table.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from sampling.drafters.masked import is_pard
from utils.commands.servers.server_doctor import doctor
from utils.commands.servers.server_load import load
from utils.commands.servers.server_text import text
from utils.commands.shared.registry import Command, CommandContext, Outcome, Reply, ShowRows, UseServers
from utils.commands.shared.result_tables import ResultTable, Row, figure
from utils.comparison.harness import Harness
from utils.drafter_formats.checkpoint import DRAFT_TO_TARGET, read_checkpoint
from utils.drafter_formats.formats import format_of
from utils.errors import UserError, check_choice
from utils.models.sources import Source, parse_path
from utils.pairs.request import PARD
from utils.servers.address import (
    ADD_EXAMPLE,
    ServerAddress,
    checked,
    key_headers,
    may_hold_key,
    parse_numbers,
    parse_server,
    parse_words,
    server_address,
    without_server,
)
from utils.servers.processes.flags import LLAMA, SGLANG, VLLM
from utils.servers.processes.programs import DRAFTS, EMBEDDED, NGRAM, PROGRAMS, Launch, command_line
from utils.text import split_words

OPTIONS = ("drafter", "draft", "method", "program", "name", "baseline")
TABLE = ResultTable(
    figure("server", "server"),
    figure("URL", "url"),
    figure("drafts", "drafts"),
    figure("ready after", "ready_seconds", "{:.1f} s"),
    figure("log", "log"),
)
RUNS = "Every prompt is sent to {0} from now on; /server stop {0} ends it, and so does the end of the session."
KEYS = "a key cannot follow --, because the command is recorded; the program reads it from its environment (HF_TOKEN)."
EXAMPLE = "/server start llama.cpp drafter=ngram draft=4"


def start(argument: str, context: CommandContext) -> Outcome:
    ours, _, flags = f"{argument} ".partition(" -- ")
    plain, options = parse_words(split_words(ours), OPTIONS, most=2)
    passed_on = tuple(split_words(flags))
    if may_hold_key(" ".join(passed_on)):
        raise UserError(KEYS)
    if not plain:
        raise UserError(f"name a server kind: {', '.join(PROGRAMS)}; for example: {EXAMPLE}")
    kind = check_choice(plain[0].lower(), tuple(PROGRAMS), "server kind")
    drafter = options.get("drafter", "")
    launch = Launch(
        kind,
        plain[1] if len(plain) > 1 else _target(kind, context),
        drafter=drafter,
        method=options.get("method", ""),
        format="" if "method" in options else _format(kind, drafter),
        program=options.get("program", ""),
        **parse_numbers(options, {"draft": (None, DRAFTS)}),
        flags=passed_on,
    )
    command_line(launch, 1)  # raises UserError for what cannot be started
    servers = context.harness.state.servers
    name = options.get("name") or free_name(launch, [address.name for address in servers.addresses])
    # The address is still unknown, but its name and its baseline can be checked.
    placeholder = server_address(name, "http://127.0.0.1:1", baseline=options.get("baseline"))
    checked([*servers.addresses, placeholder])
    rows = _starting(context.harness, placeholder, launch)
    title = f"/server start {kind}"
    subject = "server start", "", context.settings
    return [TABLE.report(*subject, rows, conclude=lambda rows: [RUNS.format(rows[0]["server"])], title=title)]


def _starting(harness: Harness, address: ServerAddress, launch: Launch) -> Iterator[Row]:
    began, servers = time.monotonic(), harness.state.servers
    for line in servers.start(address, launch):
        harness.progress(line)
    local, seconds = servers.connections[address.name].local, time.monotonic() - began
    assert local is not None
    figures = {"server": address.name, "url": local.url, "ready_seconds": seconds, "command": list(local.command)}
    shown = {"drafts": launch.label or "no speculation", "log": str(local.log)}
    yield figures | shown | asdict(launch)


def _target(kind: str, context: CommandContext) -> str:
    """The session's target if the server can load it, or the embedded model if no models are loaded."""
    harness = context.harness
    target = harness.pair.request.target if harness.has_pair else EMBEDDED
    if kind == LLAMA and target != EMBEDDED and not target.endswith(".gguf"):
        raise UserError(
            f"llama.cpp needs a GGUF file or a repository with one, and the target is {target}: name one after {kind}."
        )
    return target


def _format(kind: str, drafter: str) -> str:
    """The drafter kind of a published drafter in a local folder, otherwise empty.

    Raises UserError for a drafter that only this program can load.
    """
    if kind not in (VLLM, SGLANG) or drafter in ("", NGRAM, EMBEDDED) or not (folder := parse_path(drafter)).is_dir():
        return ""
    checkpoint = read_checkpoint(Source(str(folder), folder.name))
    if checkpoint is None:
        return ""
    if checkpoint.has(DRAFT_TO_TARGET) and not checkpoint.has("lm_head.weight"):
        raise UserError(
            f"The drafter in {drafter} drafts with rows of the target's output head that are not in its files, and "
            f"{kind} needs them there: train one with `python -m sampling.distill`."
        )
    known = format_of(checkpoint)
    return known.name if known is not None else PARD if is_pard(checkpoint.config) else ""


def free_name(launch: Launch, taken: list[str]) -> str:
    """The kind and the draft method, with a number if such a server exists."""
    base = "-".join(filter(None, (launch.kind, launch.label)))
    names = [base, *(f"{base}-{number}" for number in range(2, len(taken) + 3))]
    return next(name for name in names if name not in taken)


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
    rows = []
    for connection in context.harness.state.servers:
        address, local = connection.address, connection.local
        state = "" if local is None or local.is_running else " (it has ended)"
        key, model, baseline = f"${address.key}" if address.key else "-", address.model, address.baseline
        rows.append((address.name, address.url + state, model or "its only one", baseline or "-", key))
    return [ShowRows(rows, HEADINGS)] if rows else [Reply(NONE)]


def remove(argument: str, context: CommandContext) -> Outcome:
    addresses = context.harness.state.servers.addresses
    left = without_server(addresses, argument)
    freed = [address.name for address in addresses if address.baseline == argument]
    note = f"; {' and '.join(freed)} now without a baseline" if freed else ""
    return [UseServers(left), Reply(f"server {argument} removed{note}")]


def stop(argument: str, context: CommandContext) -> Outcome:
    context.harness.state.servers.launch_of(argument)  # raises UserError for a server that was not started here
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
