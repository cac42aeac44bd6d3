"""Sessions with servers and a screen in memory, with tiny models or without any."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fakes import Screen, constant_costs, constant_drafter, with_costs_of
from servers.loopback import Loopback, Received
from servers.loopback_values import Answer

from utils.commands import default_registry
from utils.comparison import warm_up
from utils.comparison.records import RecordFile
from utils.config.settings import Settings
from utils.engine import engine
from utils.repl.loaded_pair import SessionTools
from utils.repl.repl_session import ReplSession
from utils.servers.address import ServerAddress


def server_session(
    view: Screen, *servers: ServerAddress, monkeypatch: Any = None, pair: Any = None, records: Path | None = None
) -> ReplSession:
    """A session without models unless there is a pair; then its costs are constant, which needs `monkeypatch`."""
    if pair is not None:
        monkeypatch.setattr(warm_up, "draft_seconds", constant_drafter(lambda job: 0.0))
        monkeypatch.setattr(engine, "verify_costs", constant_costs)
        monkeypatch.setattr(engine.ForwardProbe, "longer", lambda probe: None)
    file = None if records is None else RecordFile(records)
    tools = SessionTools(default_registry(), view.renderer, file)
    return with_costs_of(ReplSession(pair, tools, Settings(engine="plain", gamma=4, length=6), servers))


def count_tokens(server: Loopback, others: Sequence[int] = (), *, drafts: bool = False) -> None:
    """Make the server one of vLLM's kind whose counters grow with each answer. `others` are the tokens of other clients
    during the first, second, ... answer. With `drafts`, a draft of two tokens is half accepted for every two tokens.
    """
    total, rest = [0, 0], iter(others)

    def answered(request: Received, answer: Answer) -> dict[str, Any]:
        total[0] += len(answer.ids)
        total[1] += next(rest, 0)
        return {}

    def metrics() -> tuple[int, str, str]:
        lines = [f"vllm:generation_tokens_total {sum(total)}"]
        counts = {"drafts": 1, "draft_tokens": 2, "accepted_tokens": 1} if drafts else {}
        lines += [f"vllm:spec_decode_num_{name}_total {number * sum(total) // 2}" for name, number in counts.items()]
        return 200, "text/plain", "\n".join(lines) + "\n"

    server.extras = answered
    models = '{"data": [{"id": "tiny", "owned_by": "vllm"}]}'
    server.pages |= {"/metrics": metrics, "/v1/models": (200, "application/json", models)}
