"""llama.cpp's server from the package xllamacpp, with the flags of `llama-server` that this program uses.

It runs as a script, in a Python that may have only xllamacpp, until it is terminated.
"""

import argparse
import signal
from collections.abc import Callable
from functools import reduce
from typing import Any

# The type of each flag's value, and the fields of llama.cpp's parameters for it.
FLAGS: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "--model": (str, ("model.path",)),
    "--port": (int, ("port",)),
    "--ctx-size": (int, ("n_ctx",)),
    "--parallel": (int, ("n_parallel",)),
    "--threads": (int, ("cpuparams.n_threads", "cpuparams_batch.n_threads")),
    "--n-gpu-layers": (int, ("n_gpu_layers",)),
    "--spec-draft-model": (str, ("speculative.draft.mparams.path",)),
    "--spec-draft-n-max": (int, ("speculative.draft.n_max",)),
    "--spec-draft-p-min": (float, ("speculative.draft.p_min",)),
    "--spec-draft-sampling": (lambda word: word == "probabilistic", ("speculative.draft.probabilistic",)),
    "--spec-ngram-simple-size-n": (int, ("speculative.ngram_simple.size_n",)),
    "--spec-ngram-simple-size-m": (int, ("speculative.ngram_simple.size_m",)),
}
DEFAULTS = {"ctx_size": 0, "parallel": 4}  # parallel: as many slots as llama-server has by default


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser("xllamacpp", allow_abbrev=False)
    for name, (kind, _) in FLAGS.items():
        flags.add_argument(name, type=kind, required=name in ("--model", "--port"))
    flags.add_argument("--host", required=True)
    flags.add_argument("--alias")
    flags.add_argument("--metrics", action="store_true")
    flags.add_argument("--spec-type", default="none")
    flags.set_defaults(**DEFAULTS)
    return flags


def parameters(options: argparse.Namespace, library: Any) -> Any:
    """llama.cpp's own parameters from the module xllamacpp. Raises AttributeError for an unknown --spec-type."""
    made = library.CommonParams()
    made.hostnames, made.endpoint_metrics = [options.host], options.metrics
    made.kv_unified = True  # as in llama-server, the slots share one cache, so that each may use the whole context
    if options.alias:
        made.model_alias = {options.alias}
    kind = "COMMON_SPECULATIVE_TYPE_" + options.spec_type.upper().replace("-", "_")
    made.speculative.types = [getattr(library.common_speculative_type, kind)]
    for name, (_, fields) in FLAGS.items():
        value = getattr(options, name.removeprefix("--").replace("-", "_"))
        for field in fields if value not in (None, "") else ():
            *owners, last = field.split(".")
            setattr(reduce(getattr, owners, made), last, value)
    return made


def main() -> None:
    options = parser().parse_args()
    import xllamacpp

    server = xllamacpp.Server(parameters(options, xllamacpp))  # returns when the model is loaded
    try:
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
    finally:
        del server


if __name__ == "__main__":
    main()
