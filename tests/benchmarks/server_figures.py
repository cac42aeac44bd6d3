"""Real engines: are the acceptance figures that utils/servers reads those that the engine writes into its own log?

    python tests/benchmarks/server_figures.py llama.cpp --model model.gguf
    python tests/benchmarks/server_figures.py vllm --model FOLDER --python ENVIRONMENT/bin/python

Each server runs on loopback, answers a few requests, and is stopped. --record keeps the answers as test data.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from utils.servers.address import ServerAddress  # noqa: E402
from utils.servers.client import ServerClient  # noqa: E402
from utils.servers.kinds import recognise  # noqa: E402
from utils.servers.kinds.completion import (  # noqa: E402
    Counters,
    Event,
    Piece,
    ServerAcceptance,
    ServerCompletion,
    ServerRequest,
)
from utils.servers.kinds.server_kind import ServerKind, own_tokens  # noqa: E402

COUNTING = "one two three four one two three four one two three four one two three"
REQUESTS = {
    "counting": ServerRequest(COUNTING, 40, ignore_eos=True, seed=1),
    "cut": ServerRequest(COUNTING, 7, seed=1),
    "list": ServerRequest("Repeat this list three times: apples, pears, plums, figs.\n", 48, ignore_eos=True, seed=1),
}
STARTUP = 600.0  # seconds
LOG_PAUSE = 12.0  # seconds; vLLM writes its figures every ten
CONTEXT = 1024  # tokens
LLAMA_LINE = re.compile(r"draft acceptance = [\d.]+ \(\s*(\d+) accepted /\s*(\d+) generated\), mean len =\s*([\d.]+)")
VLLM_LINE = re.compile(r"SpecDecoding metrics:.*Accepted: (\d+) tokens, Drafted: (\d+) tokens")


@dataclass(frozen=True, slots=True)
class Answer:
    """One request of a server. logged: the (accepted, drafted, mean length) that its log gained. events: its stream."""

    name: str
    completion: ServerCompletion
    before: Counters
    after: Counters
    acceptance: ServerAcceptance | None
    logged: list[tuple[float, ...]]
    events: list[Event]


def serve_llama(model: str, port: int, method: str) -> None:
    """Run llama.cpp's server until the process is stopped."""
    import xllamacpp

    options, kinds = xllamacpp.CommonParams(), xllamacpp.common_speculative_type
    options.model.path, options.model_alias = model, {"target"}
    options.hostnames, options.port = ["127.0.0.1"], port
    options.n_ctx, options.n_parallel, options.n_gpu_layers = CONTEXT, 1, 0
    options.endpoint_metrics, options.verbosity = True, 4
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1  # waiting threads would occupy all cores
    if method == "lookup":
        options.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        options.speculative.ngram_simple.size_n, options.speculative.ngram_simple.size_m = 3, 10
    elif method == "draft":
        options.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        options.speculative.draft.mparams.path, options.speculative.draft.n_max = model, 4
    server = xllamacpp.Server(options)
    while True:
        time.sleep(60)
        server.listening_address  # noqa: B018  the server lives as long as it is used


def llama_command(arguments: argparse.Namespace, method: str) -> list[str]:
    return [
        sys.executable,
        __file__,
        "serve",
        "--model",
        arguments.model,
        "--port",
        str(arguments.port),
        "--method",
        method,
    ]


def vllm_command(arguments: argparse.Namespace, method: str) -> list[str]:
    address = ["--host", "127.0.0.1", "--port", str(arguments.port), "--served-model-name", "target"]
    sizes = ["--max-model-len", str(CONTEXT), "--max-num-seqs", "4", "--enforce-eager"]
    program = [arguments.python, "-m", "vllm.entrypoints.openai.api_server"]
    command = [*program, "--model", arguments.model, *address, *sizes]
    if method == "plain":
        return command
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    level = "none" if method == "counters" else "detailed"
    return [*command, "--speculative-config", json.dumps(config), "--per-request-spec-decode-metrics", level]


ENGINES: dict[str, tuple[Callable[[argparse.Namespace, str], list[str]], tuple[str, ...], re.Pattern[str]]] = {
    "llama.cpp": (llama_command, ("plain", "lookup", "draft"), LLAMA_LINE),
    "vllm": (vllm_command, ("plain", "counters", "ngram"), VLLM_LINE),
}


@contextmanager
def running(command: list[str], log: Path, address: ServerAddress) -> Iterator[ServerClient]:
    """A server that is ready. It is stopped at the end."""
    with log.open("w") as out, ServerClient(address) as client:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + STARTUP
            while not client.is_ready():
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(1)
            yield client
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def recording(kind: ServerKind, events: list[Event]) -> ServerKind:
    """The kind, which also keeps the events that it reads."""
    kept, read = copy(kind), kind.read

    def keep(event: Event) -> Piece:
        events.append(event)
        return read(event)

    kept.read = keep  # type: ignore[method-assign]
    return kept


def answers(client: ServerClient, log: Path, line: re.Pattern[str], pause: float) -> Iterator[Answer]:
    kind = recognise(client)
    for name, request in REQUESTS.items():
        length = log.stat().st_size
        before = kind.counters(client)
        events: list[Event] = []
        completion = client.complete(request, recording(kind, events))
        after = kind.counters(client)
        time.sleep(pause)
        found = line.findall(log.read_bytes()[length:].decode("utf-8", "replace"))
        logged = [tuple(map(float, values)) for values in found]
        yield Answer(name, completion, before, after, kind.acceptance(completion, before, after), logged, events)


def disagreement(answer: Answer) -> str:
    """What differs between the figures that were read and those of the log, or ""."""
    acceptance = answer.acceptance
    if acceptance is None:
        return "the log counts drafts" if answer.logged else ""
    accepted, drafted = (sum(entry[place] for entry in answer.logged) for place in (0, 1))
    if (acceptance.accepted, acceptance.drafted) != (accepted, drafted):
        return f"the log counts {accepted:g} of {drafted:g}"
    lengths = [entry[2] for entry in answer.logged if len(entry) > 2]
    if acceptance.rounds and lengths and abs(lengths[0] - 1 - acceptance.accepted / acceptance.rounds) > 0.006:
        return f"the log has a mean length of {lengths[0]}"
    return ""


def described(method: str, answer: Answer, problem: str) -> str:
    """One line about an answer."""
    acceptance, tokens = answer.acceptance, own_tokens(answer.completion)
    figures = "nothing drafted"
    if acceptance is not None:
        per_forward = tokens / acceptance.forwards if tokens and acceptance.forwards else 0
        figures = (
            f"{acceptance.accepted} of {acceptance.drafted} accepted in {acceptance.rounds} passes, "
            f"tokens per forward {per_forward:.3g}, "
            f"by position {acceptance.by_position}, valid {acceptance.valid}"
        )
    counted = f"{tokens} tokens by {answer.completion.counted_by}"
    return f"{method:9} {answer.name:9} {counted}: {figures}. {problem or 'As logged.'}"


def recorded(engine: str, method: str, answer: Answer) -> dict[str, Any]:
    kept = {"engine": engine, "method": method, "name": answer.name, "text": answer.completion.text}
    figures = None if answer.acceptance is None else asdict(answer.acceptance)
    return kept | {
        "events": answer.events,
        "before": answer.before,
        "after": answer.after,
        "acceptance": figures,
    }


def main() -> int:
    """Compare all figures of an engine with its logs, and return the number of disagreements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=[*ENGINES, "serve"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--port", type=int, default=18650)
    parser.add_argument("--method", default="plain", help=argparse.SUPPRESS)
    parser.add_argument("--methods", nargs="*")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    if arguments.engine == "serve":
        serve_llama(arguments.model, arguments.port, arguments.method)
    command, methods, line = ENGINES[arguments.engine]
    address = ServerAddress("engine", f"http://127.0.0.1:{arguments.port}", timeout=STARTUP)
    kept, problems = [], 0
    for method in arguments.methods or methods:
        with TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            with running(command(arguments, method), log, address) as client:
                pause = LOG_PAUSE if arguments.engine == "vllm" else 1.0
                for answer in answers(client, log, line, pause):
                    problem = disagreement(answer)
                    problems += bool(problem)
                    sys.stdout.write(described(method, answer, problem) + "\n")
                    sys.stdout.flush()
                    kept.append(recorded(arguments.engine, method, answer))
    if arguments.record:
        arguments.record.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    return problems


if __name__ == "__main__":
    sys.exit(main())
