"""Settings by the names that are typed: those of the table, and names for parts of them, such as the temperature.

A part is shown, parsed and changed like a setting. Its value is stored in a field of Settings, whose name in records
does not change.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from utils.bounds import NGRAM_ORDER
from utils.config import sampling_parts
from utils.config.settings import Setting, Settings, setting_fields
from utils.config.value_types import Limits, Toggle
from utils.errors import UserError, check_choice

KINDS = ("basic", "onelevel")  # of n-gram storages


@dataclass(frozen=True, slots=True)
class SettingPart:
    """A name for a part of a setting. change: new settings for a typed value. is_switch: whether it is on or off."""

    name: str
    usage: str
    help: str
    show: Callable[[Settings], str]
    change: Callable[[Settings, str, Limits], Settings]
    words: tuple[str, ...] = ()
    is_switch: bool = False
    needs: str = ""
    fact: str = ""

    def describe(self, settings: Settings) -> str:
        """The value as it is read."""
        return self.show(settings)

    def has_effect(self, settings: Settings) -> bool:
        """Whether nothing else has to be turned on for it."""
        return True


def _change_order(settings: Settings, text: str, limits: Limits) -> Settings:
    return replace(settings, ngram_storage=replace(settings.ngram_storage, order=NGRAM_ORDER.parse(text)))


def _change_kind(settings: Settings, text: str, limits: Limits) -> Settings:
    """Change the kind, and the order if it is typed as well."""
    kind, _, order = text.lower().partition(" ")
    kind = check_choice(kind, KINDS, "storage")
    changed = replace(settings, ngram_storage=replace(settings.ngram_storage, kind=kind))
    return _change_order(changed, order.strip(), limits) if order else changed


def _change_keep(settings: Settings, text: str, limits: Limits) -> Settings:
    keep = Toggle().parse(text, not settings.reset_in_between, limits)
    return replace(settings, reset_in_between=not keep)


def _alias(name: str, setting: str) -> SettingPart:
    """Another name for a whole setting."""
    entry = setting_fields()[setting]
    return SettingPart(name, entry.usage, entry.help, entry.show, entry.change, entry.words)


SAMPLING_PARTS = (
    SettingPart(
        "temperature",
        "T",
        "temperature, 0 to 100; 0: greedy, without top-k and top-p",
        sampling_parts.show_temperature,
        sampling_parts.change_temperature,
    ),
    SettingPart(
        "top_k",
        "K|off",
        "sample from the K most likely tokens",
        sampling_parts.show_top_k,
        sampling_parts.change_top_k,
        (sampling_parts.OFF,),
    ),
    SettingPart(
        "top_p",
        "P|off",
        "sample from the fewest tokens with a total probability of at least P",
        sampling_parts.show_top_p,
        sampling_parts.change_top_p,
        (sampling_parts.OFF,),
    ),
)
NGRAM_PARTS = (
    SettingPart(
        "ngram kind",
        "basic|onelevel",
        "basic: n-grams of all orders from 2 to the order; onelevel: of this order only",
        lambda settings: settings.ngram_storage.kind,
        _change_kind,
        KINDS,
    ),
    SettingPart(
        "ngram order",
        "N",
        "order of the n-grams, 2 to 16",
        lambda settings: str(settings.ngram_storage.order),
        _change_order,
    ),
    _alias("ngram candidates", "top_k_filler"),
    _alias("ngram limit", "ngram_limit"),
    SettingPart(
        "ngram keep",
        "[on|off]",
        "keep the n-grams, and the texts of suffix and chain, from one prompt to the next",
        lambda settings: Toggle().show(not settings.reset_in_between),
        _change_keep,
        Toggle().words,
        is_switch=True,
    ),
)
# Settings whose names the parts replace on the screen. They can still be typed.
REPLACED = ("set_ngramstorage", "top_k_filler", "ngram_limit", "reset_in_between")


@cache
def listed_settings() -> Mapping[str, Setting | SettingPart]:
    """Every setting once, by the words that are typed after the slash: together they restore all settings."""
    fields = {name: entry for name, entry in setting_fields().items() if name not in REPLACED}
    debug = {"debug": fields.pop("debug")}
    return fields | {part.name: part for part in NGRAM_PARTS} | debug


def split_setting(line: str) -> tuple[str, str] | None:
    """The name and the value of a command line that sets a setting, or None. The value is not checked."""
    words = line.removeprefix("/").split(" ", 2)
    # The longer name first: "ngram order 3" is not the value "order 3" of ngram.
    for length in (2, 1):
        name, value = " ".join(words[:length]), " ".join(words[length:])
        if value and (name in listed_settings() or name in setting_fields()):
            return (name, value) if line.startswith("/") else None
    return None


def setting_named(name: str) -> Setting | SettingPart:
    """The setting that a present or old name stands for."""
    return listed_settings().get(name) or setting_fields()[name]


@cache
def known_settings() -> Mapping[str, Setting | SettingPart]:
    """All names that a config file may use, old ones included."""
    parts = {part.name.replace(" ", "_"): part for part in (*SAMPLING_PARTS, *NGRAM_PARTS)}
    return {**parts, **setting_fields()}


def apply_typed(settings: Settings, values: Mapping[str, str], limits: Limits) -> Settings:
    """New settings with typed values by name. Raises UserError for an unknown name or an invalid value."""
    for name, text in values.items():
        setting = known_settings()[check_choice(name, tuple(known_settings()), "setting")]
        try:
            if not text:  # would switch a toggle instead of setting it
                raise UserError("it is empty: write a value, or leave the entry out.")
            settings = setting.change(settings, text, limits)
        except UserError as error:
            raise UserError(f"settings.{name}: {error}") from error
    return settings
