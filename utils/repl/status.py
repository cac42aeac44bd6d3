"""Describes the session on its first screen, in its toolbar and for /show, and derives the limits of settings."""

from collections.abc import Sequence

from utils.comparison.arms import PREFIX
from utils.comparison.harness import SessionState
from utils.config.settings import Settings, listed_settings, setting_fields
from utils.config.value_types import Limits
from utils.decode.model_info import context_length, vocabulary_size
from utils.engine import EngineState
from utils.pairs.pair import Pair, describe_drafter, describe_target
from utils.servers.address import ServerAddress
from utils.text import count_of

SEPARATOR = " | "  # between the parts of the toolbar
TITLE = "speculative decoding, side by side"
EXAMPLE = "Write a Python function that checks whether a number is even."
COMMANDS = (
    ("/verdict", "does it help, and with which settings?"),
    ("/why, /race", "where the time went; whether a difference is real"),
    ("/whatif", "which gamma is best"),
    ("/help", "everything else; /quit leaves"),
)
SERVER_COMMANDS = (
    ("/server", "list, add and remove servers; baseline=NAME compares"),
    ("/race FILE", "the prompts of a file, with speed-ups and texts"),
    ("/help", "everything else; /quit leaves"),
)


def model_facts(
    pair: Pair | None, settings: Settings, servers: Sequence[ServerAddress] = ()
) -> tuple[tuple[str, str], ...]:
    """(name, value) pairs for /show. `pair` is None if no models are loaded."""
    listed = tuple((PREFIX + server.name, server.url) for server in servers)
    if pair is None:
        return (("target model", "none"), *listed)
    bound, kind, name = context_length(pair.target), f"({pair.drafter_kind})", str(pair.drafter_name)
    chat = "on" if settings.uses_chat else "off"
    return (
        ("target model", pair.target_name),
        # Names of published drafters end with the kind.
        ("drafter model", "none" if pair.drafter is None else name if name.endswith(kind) else f"{name} {kind}"),
        ("device", pair.device),
        ("target weights", describe_target(pair)),
        ("drafter weights", describe_drafter(pair)),
        ("engine now", pair.engine.state.sentence()),
        ("chat now", chat if settings.chat_template else "off, this tokenizer has no chat template"),
        ("context", f"{bound} tokens" if bound is not None else "unlimited"),
        ("vocabulary", f"{vocabulary_size(pair.target)} ids"),
        *listed,
    )


def pair_names(pair: Pair | None) -> str:
    return "no model" if pair is None else f"{pair.target_name} + {pair.drafter_name or 'no drafter'}"


def status_line(pair: Pair | None, settings: Settings, state: SessionState) -> str:
    """The toolbar: the pair, important and changed settings, the engine, turns of a conversation, last speeds."""
    servers, turns = len(state.servers), len(state.conversations)
    shown = ("processor",) if pair is None else ("gamma", "processor", "verify")
    values = [
        f"{name} {entry.show(settings)}"
        for name, entry in listed_settings().items()
        # Users forget the switches that they have changed.
        if name in shown or (entry.value_type.is_switch and entry.show(settings) != entry.show(Settings()))
    ]
    runs = [(run.name, run.tokens_per_second) for _, run, _ in state.last.compared] if state.last else []
    speeds = ", ".join(f"{name} {speed:.1f}" for name, speed in runs if speed)
    parts = [
        pair_names(pair),
        count_of(servers, "server") if servers else "",
        *values,
        "" if pair is None else pair.engine.state.kind,
        f"turn {turns}" if turns and settings.keeps_conversation else "",
        "" if state.training is None else state.training.summary,
        f"tokens/s: {speeds}" if speeds else "",
    ]
    return SEPARATOR.join(filter(None, parts))


def limits_of(pair: Pair) -> Limits:
    return Limits(context_length(pair.target) or Limits().context, vocabulary_size(pair.target))


def server_screen(servers: Sequence[ServerAddress], settings: Settings, width: int) -> list[str]:
    """The lines of a session without local models. Its servers have not been contacted."""
    loaded = f"{', '.join(server.name for server in servers)} · no model · {_decoding(settings)}"
    return _screen(loaded, [f"  {server.name:13}{server.url}" for server in servers], SERVER_COMMANDS, width)


def first_screen(pair: Pair, settings: Settings, seconds: float, width: int) -> list[str]:
    drafter = "no drafter" if pair.drafter is None else pair.drafter_kind
    names = f"{pair.target_name} + {pair.drafter_name if drafter == 'model' else drafter}"
    device = pair.device.upper() if pair.device == "cpu" else pair.device
    ready = f"Ready in {seconds:.0f} s. {guarantee(pair.engine.state)}"
    return _screen(f"{names} · {device} · {_decoding(settings)}", [ready], COMMANDS, width)


def _screen(loaded: str, about: Sequence[str], commands: Sequence[tuple[str, str]], width: int) -> list[str]:
    """A title and what is loaded, on one line if both fit; lines about it; and what to type."""
    gap = width - len(TITLE) - len(loaded) - 1
    return [
        *([TITLE + " " * gap + loaded] if gap > 1 else [TITLE, loaded]),
        *about,
        "",
        "  Type a prompt, for example:",
        f"  {EXAMPLE}",
        *(f"  {'then' if index == 0 else '':6}{name:13}{meaning}" for index, (name, meaning) in enumerate(commands)),
    ]


def _decoding(settings: Settings) -> str:
    """The settings that decide the texts."""
    return f"{setting_fields()['processor'].show(settings)} · seed {settings.seed}"


def guarantee(state: EngineState) -> str:
    """What is guaranteed about the texts of different strategies, and by which evidence."""
    threads = f"{state.weights}, {state.threads} thread{'s' if state.threads > 1 else ''}"
    if not state.verified:
        return f"Texts can differ where two tokens are almost equally likely: {state.reason}."
    when = f"on {state.tested_on}; a slice was rechecked now" if state.tested_on else "on this machine"
    return f"Equal texts are guaranteed here ({threads}): the engine passed its self-test {when}."
