"""The parts of a session other than its models."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from utils.commands import Registry
from utils.comparison.records import RecordFile
from utils.comparison.strategies import STRATEGIES, Strategy
from utils.engine.stored_results import ResultFile
from utils.pairs.pair import Pair
from utils.pairs.request import PAIRS, PairRequest, PairSpec
from utils.screen.renderer import Renderer


@dataclass(frozen=True, slots=True)
class SessionTools:
    """The parts of a session.

    `records` is the file of --json. `interactive` is True if prompts are typed on the screen of the answers. `load`
    loads other models and reports progress to its second argument. `pairs` can be loaded by name. `strategies` is the
    table of strategies. `results` stores the engine's results between starts, if it is not None.
    """

    registry: Registry
    renderer: Renderer
    records: RecordFile | None = None
    interactive: bool = True
    load: Callable[[PairRequest, Callable[[str], None]], Pair] | None = None
    pairs: Mapping[str, PairSpec] = field(default_factory=lambda: PAIRS)
    strategies: Sequence[Strategy] = STRATEGIES
    results: ResultFile | None = None
