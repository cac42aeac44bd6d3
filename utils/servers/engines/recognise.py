"""Which kind of engine a server runs. A new kind is one row of the table."""

from utils.servers.engines.kind import EngineKind, ServerReader
from utils.servers.engines.openai import OpenAIKind

KINDS: tuple[EngineKind, ...] = (OpenAIKind(),)  # the first one that recognises a server is used; OpenAIKind is last


def recognise(server: ServerReader) -> EngineKind:
    """The kind of a server. Raises UserError if it cannot be reached."""
    return next(kind for kind in KINDS if kind.recognises(server))
