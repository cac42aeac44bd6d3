"""Starts of an engine that read and write one file of results."""

import json
from typing import Any

from tiny import tiny_llama

from utils.engine import Engine
from utils.engine.stored_results import ResultFile
from utils.engine.weight_format import EngineWeights


def prepared(file: ResultFile, *, int8: bool = False, identity: str = "the files", **model: Any) -> Engine:
    """An engine before its start, with the same models each time unless `model` says otherwise."""
    weights = EngineWeights("int8" if int8 else "float32")
    engine = Engine([tiny_llama(**{"vocab_size": 96} | model)], weights=weights, identity=identity)
    engine.results = file
    return engine


def start(file: ResultFile, *, threads: int = 1, name: str = "auto", **options: Any) -> Engine:
    """What a start of the program does."""
    engine = prepared(file, **options)
    engine.use(name, threads)
    return engine


def edit(file: ResultFile, changes: Any) -> None:
    """Change fields of the only entry."""
    content = json.loads(file.path.read_text())
    ((key, entry),) = content.items()
    file.path.write_text(json.dumps({key: entry | changes}))


def only_entry(file: ResultFile) -> dict[str, Any]:
    (entry,) = json.loads(file.path.read_text()).values()
    return entry  # type: ignore[no-any-return]
