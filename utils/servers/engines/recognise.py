"""Which kind of engine a server runs. A new kind is one row of the table."""

from utils.servers.engines.kind import EngineKind, ServerReader
from utils.servers.engines.llama_cpp import LlamaCppKind
from utils.servers.engines.openai import OpenAIKind
from utils.servers.engines.sglang import SglangKind
from utils.servers.engines.vllm import VllmKind

# The first one that recognises a server is used, so the fallback is last.
KINDS: tuple[EngineKind, ...] = (LlamaCppKind(), VllmKind(), SglangKind(), OpenAIKind())


def recognise(server: ServerReader) -> EngineKind:
    """The kind of a server. Raises UserError if it cannot be reached."""
    return next(kind for kind in KINDS if kind.recognises(server))
