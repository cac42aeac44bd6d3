"""Other ways in which programs read the same checkpoint, for the doctor to compare."""

from __future__ import annotations

from dataclasses import replace

from utils.models.feature_drafter import Conventions


def shifted_layers(own: Conventions, count: int) -> dict[str, Conventions]:
    """The hidden states one layer earlier or later, and the last one before or after the final norm.

    count: the number of the target's layers n. Number n is after the final norm, and n + 1 before it.
    """
    plain = tuple(count if layer in (-1, count + 1) else layer for layer in own.feature_layers)
    found = {}
    for shift, name in ((1, "outputs of layers, one later"), (-1, "inputs of layers, one earlier")):
        layers = tuple(layer + shift for layer in plain)
        if all(0 <= layer <= count for layer in layers):
            found[f"layer ids read as {name}"] = tuple(count + 1 if layer == count else layer for layer in layers)
            if count in layers:
                found[f"layer ids read as {name}, the last one after the final norm"] = layers
    if count in plain:
        for last, name in ((count, "after"), (count + 1, "before")):
            layers = tuple(last if layer == count else layer for layer in plain)
            if layers != tuple(count if layer == -1 else layer for layer in own.feature_layers):
                found[f"the last hidden state {name} the final norm"] = layers
    return {name: replace(own, feature_layers=layers) for name, layers in found.items()}
