"""What a session is built from besides its models."""

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

    records: the file of --json. interactive: whether prompts are typed on the screen that shows the answers.

    load: loads other models; its second argument receives progress messages. pairs: those that can be loaded by name.
    strategies: the table of strategies. results: where the engine keeps results from one start to the next, None:
    nowhere.
    """

    registry: Registry
    renderer: Renderer
    records: RecordFile | None = None
    interactive: bool = True
    load: Callable[[PairRequest, Callable[[str], None]], Pair] | None = None
    pairs: Mapping[str, PairSpec] = field(default_factory=lambda: PAIRS)
    strategies: Sequence[Strategy] = STRATEGIES
    results: ResultFile | None = None
