"""The first screen of an interactive session: what is loaded, what is guaranteed, an example and the next command."""

from collections.abc import Sequence

from utils.config.setting_table import setting_fields
from utils.config.settings import Settings
from utils.engine import EngineState
from utils.pairs.pair import Pair
from utils.servers.address import ServerAddress

TITLE = "speculative decoding, side by side"
EXAMPLE = "Write a Python function that checks whether a number is even."
COMMANDS = (
    ("/verdict", "does it help, and with which settings?"),
    ("/why, /race", "where the time went; whether a difference is real"),
    ("/whatif", "which gamma is best"),
    ("/help", "everything else; /quit leaves"),
)


def server_screen(servers: Sequence[ServerAddress], settings: Settings, width: int) -> list[str]:
    """The lines of a session without local models. Its servers have not been contacted."""
    names = ", ".join(server.name for server in servers)
    loaded = f"{names} · no model · {setting_fields()['processor'].show(settings)} · seed {settings.seed}"
    commands = (
        ("/server", "list, add and remove servers; baseline=NAME compares"),
        ("/race FILE", "the prompts of a file, with speed-ups and texts"),
        ("/help", "everything else; /quit leaves"),
    )
    return [
        *_heading(loaded, width),
        *(f"  {server.name:13}{server.url}" for server in servers),
        "",
        "  Type a prompt, for example:",
        f"  {EXAMPLE}",
        *(f"  {'then' if index == 0 else '':6}{name:13}{meaning}" for index, (name, meaning) in enumerate(commands)),
    ]


def first_screen(pair: Pair, settings: Settings, seconds: float, width: int) -> list[str]:
    """The lines of the first screen, without those that only some pairs need."""
    return [
        *_heading(_loaded(pair, settings), width),
        f"Ready in {seconds:.0f} s. {guarantee(pair.engine.state)}",
        "",
        "  Type a prompt, for example:",
        f"  {EXAMPLE}",
        *(f"  {'then' if index == 0 else '':6}{name:13}{meaning}" for index, (name, meaning) in enumerate(COMMANDS)),
    ]


def guarantee(state: EngineState) -> str:
    """What is guaranteed about the texts of different strategies, and by which evidence."""
    threads = f"{state.weights}, {state.threads} thread{'s' if state.threads > 1 else ''}"
    if not state.verified:
        return f"Texts can differ where two tokens are almost equally likely: {state.reason}."
    when = f"on {state.tested_on}; one verify width was rechecked now" if state.tested_on else "on this machine"
    return f"Equal texts are guaranteed here ({threads}): the engine passed its self-test {when}."


def _heading(loaded: str, width: int) -> list[str]:
    """The title and what is loaded, on one line if both fit."""
    gap = width - len(TITLE) - len(loaded) - 1
    return [TITLE + " " * gap + loaded] if gap > 1 else [TITLE, loaded]


def _loaded(pair: Pair, settings: Settings) -> str:
    """The models, the device and the settings that decide the texts."""
    drafter = "no drafter" if pair.drafter is None else pair.drafter_kind
    names = f"{pair.target_name} + {pair.drafter_name if drafter == 'model' else drafter}"
    device = pair.device.upper() if pair.device == "cpu" else pair.device
    return f"{names} · {device} · {setting_fields()['processor'].show(settings)} · seed {settings.seed}"
