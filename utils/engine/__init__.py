"""How the layers of the loaded models are computed, with how many threads, and how long it takes."""

from utils.engine.engine import Engine, EngineState

__all__ = ["Engine", "EngineState"]
