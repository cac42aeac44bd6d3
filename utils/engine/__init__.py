"""How models are computed: plain, or row-invariant; with which weights and how many threads."""

from utils.engine.engine import Engine, EngineState

__all__ = ["Engine", "EngineState"]
