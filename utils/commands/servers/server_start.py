"""/server start: local servers of installed programs."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from utils.bounds import WholeRange
from utils.commands.shared.columns import ResultTable, figure, figures_of
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.registry import CommandContext
from utils.comparison.reports import Finding, Progress, Report, ReportEvent
from utils.drafter_formats.checkpoint import DRAFT_TO_TARGET, read_checkpoint
from utils.drafter_formats.formats import format_of
from utils.errors import UserError, check_choice
from utils.models.sources import Source, parse_path
from utils.servers.address import (
    ServerAddress,
    parse_numbers,
    parse_words,
    server_address,
    split_words,
    with_server,
)
from utils.servers.connection import ServerList
from utils.servers.processes.local_servers import READY_SECONDS
from utils.servers.processes.programs import (
    CONTEXT,
    DRAFTS,
    EMBEDDED,
    LLAMA,
    NGRAM,
    PARALLEL,
    PROGRAMS,
    SGLANG,
    VLLM,
    Launch,
    command_line,
)

SIZES = {"draft": (None, DRAFTS), "context": (None, CONTEXT), "parallel": (None, PARALLEL)}
WAIT = {"wait": (READY_SECONDS, WholeRange(1, 86_400))}
OPTIONS = (*SIZES, *WAIT, "drafter", "method", "program", "name", "baseline")
TABLE = ResultTable(
    figure("server", "server"),
    figure("URL", "url"),
    figure("drafts", "drafts"),
    figure("ready after", "ready_seconds", "{:.1f} s"),
    figure("log", "log"),
)
RUNS = "Every prompt is sent to {0} from now on; /server stop {0} ends it, and so does the end of the session."
UNTRIED = "The flags for {} are from its documentation and were never run where this program was built."
# The names of vLLM and SGLang for published drafter formats, from their sources.
METHODS = {
    VLLM: {"EAGLE-3": "eagle3", "DFlash": "dflash", "DSpark": "dspark"},
    SGLANG: {"EAGLE-3": "EAGLE3", "DFlash": "DFLASH", "DSpark": "DSPARK"},
}
BORROWED = (
    "The drafter in {} drafts with rows of the target's output head that are not in its files, and {} needs them "
    "there: train one with `python -m sampling.distill`."
)
EXAMPLE = "/server start llama.cpp drafter=ngram draft=4"


def start(argument: str, context: CommandContext) -> Outcome:
    ours, _, flags = f"{argument} ".partition(" -- ")
    plain, options = parse_words(split_words(ours), OPTIONS, most=2)
    if not plain:
        raise UserError(f"name a server kind: {', '.join(PROGRAMS)}; for example: {EXAMPLE}")
    kind = check_choice(plain[0].lower(), tuple(PROGRAMS), "server kind")
    drafter = options.get("drafter", "")
    launch = Launch(
        kind,
        plain[1] if len(plain) > 1 else _target(kind, context),
        drafter=drafter,
        method=options.get("method") or _method(kind, drafter),
        program=options.get("program", ""),
        **parse_numbers(options, SIZES),
        flags=tuple(split_words(flags)),
    )
    limit = parse_numbers(options, WAIT)["wait"]
    command_line(launch, 1)  # raises UserError for what cannot be started
    servers = context.harness.state.servers
    name = options.get("name") or free_name(launch, [address.name for address in servers.addresses])
    # The address is still unknown, but its name and its baseline can be checked.
    placeholder = server_address(name, "http://127.0.0.1:1", baseline=options.get("baseline"))
    with_server(servers.addresses, placeholder)
    report = Report(
        *("server start", "", context.settings, TABLE.headings),
        _starting(servers, placeholder, launch, limit),
        _conclusion,
        title=f"/server start {kind}",
    )
    return [RunReport(report)]


def _starting(servers: ServerList, address: ServerAddress, launch: Launch, limit: float) -> Iterator[ReportEvent]:
    began = time.monotonic()
    for line in servers.start(address, launch, limit=limit):
        yield Progress(line)
    url, seconds = servers.connections[address.name].address.url, time.monotonic() - began
    process = servers.local.process_of(address.name)
    figures = {"server": address.name, "url": url, "ready_seconds": seconds, "command": list(process.command)}
    shown = {"drafts": launch.label or "no speculation", "log": str(process.log)}
    yield TABLE.finding(figures | shown | asdict(launch))


def _conclusion(findings: Sequence[Finding]) -> list[str]:
    rows = figures_of(findings)
    lines, kinds = [RUNS.format(row["server"]) for row in rows], {row["kind"] for row in rows}
    return [*lines, *(UNTRIED.format(kind) for kind in kinds if not PROGRAMS[kind].was_run)]


def _target(kind: str, context: CommandContext) -> str:
    """The session's target if the server can load it, or the embedded model if no models are loaded."""
    harness = context.harness
    target = harness.pair.request.target if harness.has_pair else EMBEDDED
    if kind == LLAMA and target != EMBEDDED and not target.endswith(".gguf"):
        raise UserError(
            f"llama.cpp needs a GGUF file or a repository with one, and the target is {target}: name one after {kind}."
        )
    return target


def _method(kind: str, drafter: str) -> str:
    """The server program's name for the format of a published drafter in a local folder, otherwise empty.

    Raises UserError for a drafter that it cannot load or whose name is unknown.
    """
    if kind not in METHODS or drafter in ("", NGRAM, EMBEDDED) or not (folder := parse_path(drafter)).is_dir():
        return ""
    checkpoint = read_checkpoint(Source(str(folder), folder.name))
    known = None if checkpoint is None else format_of(checkpoint)
    if known is not None and known.name not in METHODS[kind]:
        words = ", ".join(METHODS[kind])
        raise UserError(
            f"The drafter in {drafter} has the format {known.name}. Words of {kind} are known for {words} only: give "
            "its own with method=."
        )
    if checkpoint is not None and checkpoint.has(DRAFT_TO_TARGET) and not checkpoint.has("lm_head.weight"):
        raise UserError(BORROWED.format(drafter, kind))
    return "" if known is None else METHODS[kind][known.name]


def free_name(launch: Launch, taken: list[str]) -> str:
    """The kind and the draft method, with a number if such a server exists."""
    base = "-".join(filter(None, (launch.kind, launch.label)))
    names = [base, *(f"{base}-{number}" for number in range(2, len(taken) + 3))]
    return next(name for name in names if name not in taken)
