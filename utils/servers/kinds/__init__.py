"""The differences between server programs with the same protocol, and which kind a server has. A new kind is one row of
the table.
"""

from utils.servers.kinds.llama_cpp import LlamaCppKind
from utils.servers.kinds.server_kind import ServerError, ServerKind, ServerReader
from utils.servers.kinds.vllm import SglangKind, VllmKind

KINDS = (LlamaCppKind(), VllmKind(), SglangKind())
INTERNAL_ERROR = 500  # the first status of errors on the server's side


def recognise(server: ServerReader) -> ServerKind:
    """The kind of a server, by the owner of its first model. Raises ServerError if it cannot be reached."""
    owner = ""
    try:
        owner = str(server.get_json("/v1/models")["data"][0]["owned_by"])
    except (LookupError, TypeError):
        pass
    except ServerError as error:
        # `transformers serve` fails here without a folder of downloaded models, but answers other requests.
        if (error.status or 0) < INTERNAL_ERROR:
            raise
    return next((kind for kind in KINDS if kind.owner == owner), ServerKind())
