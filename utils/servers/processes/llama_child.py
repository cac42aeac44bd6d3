"""llama.cpp's server from the package xllamacpp, with the flags of `llama-server` that this program uses.

It runs as a script, in a Python that has xllamacpp and perhaps nothing else, until it is terminated.
"""

import argparse
import signal
from typing import Any

DEFAULT_SLOTS = 4  # as many as llama-server has by default
TYPE = "COMMON_SPECULATIVE_TYPE_"


def parser() -> argparse.ArgumentParser:
    """The flags, by their names in llama-server."""
    flags = argparse.ArgumentParser("xllamacpp", allow_abbrev=False)
    flags.add_argument("--model", required=True)
    flags.add_argument("--alias")
    flags.add_argument("--host", required=True)
    flags.add_argument("--port", type=int, required=True)
    flags.add_argument("--metrics", action="store_true")
    flags.add_argument("--ctx-size", type=int, default=0)
    flags.add_argument("--parallel", type=int, default=DEFAULT_SLOTS)
    flags.add_argument("--threads", type=int)
    flags.add_argument("--n-gpu-layers", type=int)
    flags.add_argument("--spec-type", default="none")
    flags.add_argument("--spec-draft-model")
    flags.add_argument("--spec-draft-n-max", type=int)
    flags.add_argument("--spec-draft-p-min", type=float)
    flags.add_argument("--spec-ngram-simple-size-n", type=int)
    flags.add_argument("--spec-ngram-simple-size-m", type=int)
    return flags


def parameters(options: argparse.Namespace, library: Any) -> Any:
    """llama.cpp's own parameters. library: the module xllamacpp. Raises AttributeError for an unknown --spec-type."""
    made = library.CommonParams()
    made.model.path, made.hostnames, made.port = options.model, [options.host], options.port
    made.endpoint_metrics, made.n_ctx = options.metrics, options.ctx_size
    # As in llama-server, the slots share one cache, so that each may use the whole context.
    made.n_parallel, made.kv_unified = options.parallel, True
    if options.alias:
        made.model_alias = {options.alias}
    if options.threads is not None:
        made.cpuparams.n_threads = made.cpuparams_batch.n_threads = options.threads
    if options.n_gpu_layers is not None:
        made.n_gpu_layers = options.n_gpu_layers
    _speculation(made.speculative, options, library)
    return made


def _speculation(made: Any, options: argparse.Namespace, library: Any) -> None:
    made.types = [getattr(library.common_speculative_type, TYPE + options.spec_type.upper().replace("-", "_"))]
    if options.spec_draft_model:
        made.draft.mparams.path = options.spec_draft_model
    if options.spec_draft_n_max is not None:
        made.draft.n_max = options.spec_draft_n_max
    if options.spec_draft_p_min is not None:
        made.draft.p_min = options.spec_draft_p_min
    if options.spec_ngram_simple_size_n is not None:
        made.ngram_simple.size_n = options.spec_ngram_simple_size_n
    if options.spec_ngram_simple_size_m is not None:
        made.ngram_simple.size_m = options.spec_ngram_simple_size_m


def main() -> None:
    """Serve until a signal ends the process."""
    options = parser().parse_args()
    import xllamacpp

    server = xllamacpp.Server(parameters(options, xllamacpp))  # returns when the model is loaded
    try:
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
    finally:
        del server


if __name__ == "__main__":
    main()
