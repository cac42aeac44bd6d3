"""Environment and fixtures of all tests.

The environment is set before torch is imported: a passive wait policy, because spinning threads slow down a busy
machine, no model hub, and one thread in each of several test processes. Caches, the configuration and histories lie in
a temporary folder, so no test reads or writes those of the user.
"""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TESTS_HOME"] = tempfile.mkdtemp(prefix="speculative-decoding-tests-")
# Each process has folders of its own. Set here and not in a fixture, because the hub's library reads HF_HOME once.
FOLDERS = Path(os.environ["TESTS_HOME"], os.environ.get("PYTEST_XDIST_WORKER", "main"))
os.environ.setdefault("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))  # a wheel is downloaded once
# HOME as well, for tests that unset the others and for libraries that know no other: nothing leads to the user's files.
for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "HF_HOME"):
    os.environ[name] = str(FOLDERS / name.lower())
# A background job of a shell ignores these signals, and would pass that on to the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Property tests try fewer examples in `make test` than in `make test-full`, and each may take its time."""
    settings.register_profile(
        "make test", max_examples=40 if "not full" in config.option.markexpr else 100, deadline=None
    )
    settings.load_profile("make test")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folders of all processes."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["TESTS_HOME"], ignore_errors=True)


gc.disable()  # the imports create a million objects that stay


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, and let the program leave it to Python: both take more time
    than tiny models. Tests of memory collect garbage themselves.
    """
    gc.freeze()
    gc.enable()
    if memory := sys.modules.get("utils.freed_memory"):  # loaded by the modules of tests that load models
        memory.gc = SimpleNamespace(collect=int)
        memory.trim_allocator = int


@pytest.fixture(autouse=True)
def _stop_patches() -> Iterator[None]:
    """Undo what tests have patched with unittest.mock."""
    yield
    mock.patch.stopall()


@pytest.fixture(autouse=True)
def _few_widths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test of engines tests every width only where it is the subject, and in `make test-full`."""
    selftest = sys.modules.get("utils.engine.selftest")
    if selftest and request.module.__name__ != "test_self_test" and "full" not in request.keywords:
        for name in ("EVERY_WIDTH", "TILED_WIDTHS"):
            monkeypatch.setattr(selftest, name, range(2, 8))


@pytest.fixture
def view() -> Any:
    """A screen in memory on which no line is broken."""
    from fakes import screen  # torch comes with it

    return screen()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "speculative-decoding"


@pytest.fixture(scope="session")
def real_embedded_model() -> None:
    """The embedded model as users get it. Its files alone outlive a run of tests, in a folder that all runs share."""
    from embedded_session import share_embedded_model  # torch comes with it

    share_embedded_model()


@pytest.fixture
def readings_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that compare the same reading of a drafter with the same text share the result."""
    from trained_drafter import remembered_hits  # torch comes with it

    monkeypatch.setattr("utils.pairs.doctor.OwnText.hits", remembered_hits)


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint folders by name. Tests change only copies of them."""
    from shelf import fill_shelf  # torch comes with it

    return fill_shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder whose layers have several groups of 32, 64 or 128 weights in a row."""
    from tiny import save_folder, tiny_llama, tiny_tokenizer

    model = tiny_llama(vocab_size=300, hidden_size=64, intermediate_size=256, num_hidden_layers=3)
    return save_folder(tmp_path_factory.mktemp("model") / "wide", model, tiny_tokenizer())
