"""llama.cpp with the embedded model for the tests of `make test-servers`, which sets up its environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from embedded_session import share_embedded_model
from servers.launches import started

from utils.models.embedded import embedded_gguf
from utils.servers.address import ServerAddress
from utils.servers.client import ServerClient
from utils.servers.processes.local_servers import LocalServer
from utils.servers.processes.programs import Launch

PYTHON = "SERVERS_PYTHON"


def llama_python() -> str:
    """The Python that has xllamacpp. Without one the test fails: these tests are deselected otherwise, not skipped."""
    if PYTHON not in os.environ:
        pytest.fail(f"{PYTHON} is not set; `make test-servers` runs this test")
    return os.environ[PYTHON]


def embedded_file() -> str:
    share_embedded_model()
    return str(embedded_gguf(lambda line: None))


def llama_launch(*, context: int = 2048, parallel: int = 1, **values: object) -> Launch:
    """A launch of llama.cpp with the embedded model, in a small context."""
    model = embedded_file()
    if values.get("drafter") == "self":
        values["drafter"] = model
    flags = ("--ctx-size", str(context), "--parallel", str(parallel), "--threads", "1")  # others would spin
    return Launch("llama.cpp", model, program=llama_python(), flags=flags, **values)


@contextmanager
def running_llama(**values: object) -> Iterator[tuple[ServerClient, LocalServer]]:
    """A client of a server that runs within the block."""
    server = started("llama", llama_launch(**values))
    try:
        with ServerClient(ServerAddress("llama", server.url)) as client:
            yield client, server
    finally:
        server.stop()
