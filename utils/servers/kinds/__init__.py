"""The differences between server programs with the same protocol, and which kind a server has. A new kind is one row of
the table.
"""

from utils.servers.kinds.llama_cpp import LlamaCppKind
from utils.servers.kinds.server_kind import ServerKind, ServerReader
from utils.servers.kinds.vllm import SglangKind, VllmKind

# The first kind that recognises a server is used, so the fallback is last.
KINDS = (LlamaCppKind(), VllmKind(), SglangKind(), ServerKind())


def recognise(server: ServerReader) -> ServerKind:
    """The kind of a server. Raises ServerError if it cannot be reached."""
    return next(kind for kind in KINDS if kind.recognises(server))
