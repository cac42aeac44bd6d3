"""What the OpenVINO engine can compute on this machine. OpenVINO itself is not imported."""

from importlib.util import find_spec

from utils.engine.machine import cpu_features

# Integer products with a scale for each row of the input. Without these instructions OpenVINO converts the weights to
# float32 in every call, and the bits of a row depend on the number of rows.
INTEGER_FEATURES = frozenset({"avx_vnni", "avx512_vnni"})
BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16"})
REQUIRED = {"int8": INTEGER_FEATURES, "int4": INTEGER_FEATURES, "gguf": INTEGER_FEATURES, "bfloat16": BFLOAT16_FEATURES}


def unsupported(weights: str) -> str | None:
    """Why OpenVINO cannot compute weights of this format here, or None if it can."""
    if find_spec("openvino") is None:
        return "the package openvino is not installed"
    required = REQUIRED.get(weights, frozenset())
    if required and required.isdisjoint(cpu_features()):
        return f"{weights} weights need a processor with {' or '.join(sorted(required))}"
    return None
