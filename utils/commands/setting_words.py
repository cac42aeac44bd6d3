"""Descriptions of the words that complete the argument of a setting, by its command."""

from collections.abc import Mapping

SETTING_WORDS: Mapping[str, Mapping[str, str]] = {
    "gamma": {"auto": "as many as are likely to pay"},
    "drafter_kind": {
        "loaded": "the drafter of the pair",
        "model": "the drafter model",
        "head": "a drafter that reads hidden states",
        "layers:K": "the first K layers of the target",
        "lookup": "prompt lookup",
        "suffix": "a suffix automaton of the texts",
        "chain": "suffix, then the drafter of the pair",
    },
    "debug": {
        "on": "a line per round",
        "off": "the texts only",
        "full": "also p/q, and why drafts were rejected",
    },
    "costs": {"measure": "measure them on the loaded models"},
    "verify": {
        "rejection": "accept each draft with probability min(1, p/q)",
        "block": "accept drafts jointly, at least as many",
        "coupled": "the same text as the target alone",
    },
    "processor": {
        "greedy": "[T]: the likeliest token",
        "multinomial": "T: sample at temperature T",
        "topk": "T K: the K likeliest tokens at temperature T",
        "nucleus": "T P: a probability mass of P at temperature T",
        "topknucleus": "T K P: both",
    },
    "top_k": {"off": "sample from all tokens"},
    "top_p": {"off": "sample from all tokens"},
    "engine": {
        "auto": "the fastest one, by measurement",
        "plain": "PyTorch unchanged",
        "invariant": "the logits do not depend on the verify width",
        "openvino": "everything but attention in OpenVINO, on CPUs",
        "cuda_graph": "forward passes are recorded once and replayed, on CUDA devices",
    },
    "threads": {"auto": "the fastest number"},
    "cache": {"on": "keep them", "off": "compute all tokens again in every round"},
    "chat": {"on": "use it", "off": "send prompts as they stand", "auto": "use it if there is one"},
    "system": {"none": "an empty one", "default": "the one of the chat template"},
}
