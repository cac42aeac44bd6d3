"""Sessions with servers and a screen in memory, with tiny models or without any."""

from pathlib import Path
from typing import Any

from fakes import Screen, constant_costs, constant_drafter, with_costs_of

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
