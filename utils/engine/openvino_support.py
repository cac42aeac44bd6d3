"""What the OpenVINO engine can compute on this machine. OpenVINO itself is not imported."""

import os
from importlib.util import find_spec

from utils.engine.machine import cpu_features

# Integer products with a scale for each row of the input. Without these instructions OpenVINO converts the weights to
# float32 in every call, and the bits of a row depend on the number of rows.
INTEGER_FEATURES = frozenset({"avx_vnni", "avx512_vnni"})
BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16"})
REQUIRED = {"int8": INTEGER_FEATURES, "int4": INTEGER_FEATURES, "gguf": INTEGER_FEATURES, "bfloat16": BFLOAT16_FEATURES}

# These variables limit the instructions of the kernels that OpenVINO calls, but not those that it expects of the
# processor. Under limits that turn off what a format needs it computes nonsense and writes outside its buffers.
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
WITHOUT_INTEGERS = frozenset({"SSE41", "AVX", "AVX2"})
WITHOUT_BFLOAT16 = WITHOUT_INTEGERS | {"AVX2_VNNI", "AVX2_VNNI_2"}


def unsupported(weights: str) -> str | None:
    """Why OpenVINO cannot compute weights of this format here, or None if it can."""
    if find_spec("openvino") is None:
        return "the package openvino is not installed"
    required = REQUIRED.get(weights, frozenset())
    if required and required.isdisjoint(cpu_features()):
        return f"{weights} weights need a processor with {' or '.join(sorted(required))}"
    refused = WITHOUT_BFLOAT16 if weights == "bfloat16" else WITHOUT_INTEGERS
    limits = ((name, os.environ.get(name, "").upper()) for name in LIMITS)
    limit = next((f"{name}={value}" for name, value in limits if required and value in refused), None)
    return limit and f"{limit} turns off instructions that {weights} weights need"
