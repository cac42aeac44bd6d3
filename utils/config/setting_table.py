"""The table of settings as they are typed: the fields of Settings, and parts of them such as the temperature.

A part is shown, parsed and changed like a field. It is stored in a field, whose name in records does not change.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any

from utils.bounds import NGRAM_ORDER, TEMPERATURE, TOP_P, WholeRange
from utils.config.settings import Settings
from utils.config.value_types import ON_OFF, STORAGE, Limits, ValueType, number, number_or
from utils.errors import UserError, check_choice
from utils.metrics.costs import Costs
from utils.text import encodable


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table.

    `name` is the field, or the typed words of a part. `value_type` parses and shows a value. `get` and `put` read it
    from Settings and make new Settings with another one. `default` is a field's.

    `group` is a heading of /help, empty for a field that only parts set. `summary` has at most 39 characters. `text` is
    its page, in sentences. `example` is an argument to type, and the lines that it shows unless they repeat it. `forms`
    describe what can be typed, above all its completions. `see_also` lists commands and figures. `rank` is its place on
    the first page of /help; settings with 0 are only on /help all.

    `needs` is a toggle without which it has no effect. `fact` is the label in /show of the value in effect. `is_flag`
    is True if it is also a command-line flag.
    """

    name: str
    value_type: ValueType
    get: Callable[[Settings], Any]
    put: Callable[[Settings, Any], Settings]
    default: Any = None
    group: str = ""
    summary: str = ""
    text: str = ""
    example: tuple[str, ...] = ()
    forms: Mapping[str, str] = field(default_factory=dict)
    see_also: tuple[str, ...] = ()
    rank: int = 0
    needs: str = ""
    fact: str = ""
    is_flag: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether it toggles between on and off without an argument."""
        return self.value_type.is_switch

    def show(self, settings: Settings) -> str:
        """The value as it would be typed."""
        return self.value_type.show(self.get(settings))

    def describe(self, settings: Settings) -> str:
        """The value for reading, if that differs from the typed form."""
        value = self.get(settings)
        return value.text if isinstance(value, Costs) else self.show(settings)

    def has_effect(self, settings: Settings) -> bool:
        """Whether the setting that this one needs is on."""
        return self.needs != "chat" or settings.uses_chat

    def change(self, settings: Settings, text: str, limits: Limits) -> Settings:
        """New settings with the parsed value of `text`. Raises UserError if it is not valid."""
        return self.put(settings, self.value_type.parse(text, self.get(settings), limits))


def _put(name: str, settings: Settings, value: Any) -> Settings:
    return replace(settings, **{name: value})


@cache
def setting_fields() -> Mapping[str, Setting]:
    """The fields of Settings by their names."""
    rows = (
        Setting(
            entry.name,
            get=attrgetter(entry.name),
            put=partial(_put, entry.name),
            default=entry.default,
            **entry.metadata,
        )
        for entry in fields(Settings)
        if entry.metadata
    )
    return {row.name: row for row in rows}


SAMPLING_PARTS = (
    Setting(
        "temperature",
        number(TEMPERATURE, usage="T"),
        lambda settings: settings.processor.effective_temperature,
        lambda settings, value: replace(settings, processor=settings.processor.changed(temperature=value)),
        group="decoding",
        summary="temperature, 0 to 100; 0: greedy",
        text="The temperature of the processor, 0 to 100. 0 is greedy decoding, which has no top-k and top-p. Any "
        "other temperature keeps the top-k and top-p that are set.",
        example=("0.7", "temperature: 0.7; processor: multinomial 0.7"),
        see_also=("top_p", "top_k", "processor", "seed", "verify"),
        rank=2,
    ),
    Setting(
        "top_k",
        number_or(number(WholeRange(0), limit="vocabulary", usage="K"), "off", same=0),
        lambda settings: settings.processor.top_k,
        lambda settings, value: replace(settings, processor=settings.processor.changed(top_k=value)),
        group="decoding",
        summary="sample from the K likeliest tokens",
        text="Sample from the K most likely tokens only. The temperature and top-p stay. With greedy decoding, which "
        "has no top-k, the temperature becomes 1.",
        example=("40", "top_k: 40; processor: topk 0.7 40"),
        forms={"K": "1 to the size of the vocabulary", "off": "or 0: sample from all tokens"},
        see_also=("temperature", "top_p", "processor"),
    ),
    Setting(
        "top_p",
        number_or(number(TOP_P, usage="P"), "off", same=1),
        lambda settings: settings.processor.top_p,
        lambda settings, value: replace(settings, processor=settings.processor.changed(top_p=value)),
        group="decoding",
        summary="sample from a probability mass of P",
        text="Sample from the fewest tokens with a total probability of at least P. The temperature and top-k stay. "
        "With greedy decoding, which has no top-p, the temperature becomes 1.",
        example=("0.95", "top_p: 0.95; processor: nucleus 0.7 0.95"),
        forms={"P": "above 0, at most 1", "off": "or 1: sample from all tokens"},
        see_also=("temperature", "top_k", "processor"),
    ),
)
NGRAM_PARTS = (
    Setting(
        "ngram kind",
        replace(STORAGE, show=attrgetter("kind")),
        lambda settings: settings.ngram_storage,
        partial(_put, "ngram_storage"),
        summary="orders of the stored n-grams",
        forms={"basic": "all orders from 2 to the order", "onelevel": "one order only"},
    ),
    Setting(
        "ngram order",
        number(NGRAM_ORDER),
        lambda settings: settings.ngram_storage.order,
        lambda settings, value: replace(settings, ngram_storage=replace(settings.ngram_storage, order=value)),
        summary="order of the n-grams, 2 to 16",
    ),
    replace(
        setting_fields()["top_k_filler"],
        name="ngram candidates",
        summary="top tokens stored per position, 1 to 64",
    ),
    replace(
        setting_fields()["ngram_limit"],
        name="ngram limit",
        summary="maximum number of n-grams, about 100 bytes each",
    ),
    Setting(
        "ngram keep",
        ON_OFF,
        lambda settings: not settings.reset_in_between,
        lambda settings, value: replace(settings, reset_in_between=not value),
        summary="keep the n-grams from prompt to prompt",
        forms={"on": "keep them", "off": "empty the storage before each prompt"},
    ),
)


@cache
def listed_settings() -> Mapping[str, Setting]:
    """Every setting once, by the words after the slash. Together they restore all settings."""
    rows = {name: row for name, row in setting_fields().items() if row.group}
    debug = {"debug": rows.pop("debug")}
    return rows | {part.name: part for part in NGRAM_PARTS} | debug


def split_setting(line: str) -> tuple[str, str] | None:
    """The name and the value in a command line that sets a setting, or None. The value is not checked."""
    words = line.removeprefix("/").split(" ", 2)
    # The longer name first: "ngram order 3" is not the value "order 3" of ngram.
    for length in (2, 1):
        name, value = " ".join(words[:length]), " ".join(words[length:])
        if value and name in listed_settings():
            return (name, value) if line.startswith("/") else None
    return None


@cache
def known_settings() -> Mapping[str, Setting]:
    """All settings by their names in a config file."""
    rows = (*SAMPLING_PARTS, *listed_settings().values())
    return {row.name.replace(" ", "_"): row for row in rows}


def flag_settings() -> list[Setting]:
    """The settings that are also command-line flags."""
    return [row for row in setting_fields().values() if row.is_flag]


def apply_typed(settings: Settings, values: Mapping[str, str], limits: Limits) -> Settings:
    """New settings with typed values by name. Raises UserError for an unknown name or an invalid value."""
    for name, text in values.items():
        setting = known_settings()[check_choice(name, tuple(known_settings()), "setting")]
        try:
            if not text:  # an empty text would toggle the setting
                raise UserError("it is empty: write a value, or leave the entry out.")
            settings = setting.change(settings, text, limits)
        except UserError as error:
            raise UserError(f"settings.{name}: {error}") from error
    return settings


def reset_unsupported(settings: Settings, limits: Limits) -> Settings:
    """New settings in which values that the target does not support are reset to their defaults."""
    for setting in setting_fields().values():
        try:
            # A value is supported if the text of `show` can be parsed under the new limits.
            setting.change(settings, setting.show(settings), limits)
        except UserError:
            settings = setting.put(settings, setting.default)
    return settings


def as_json(settings: Settings) -> dict[str, bool | int | str]:
    """Settings for a record: numbers and booleans as they are, everything else as it would be typed."""
    values = ((row, row.get(settings)) for row in setting_fields().values())
    recorded = {row.name: value if isinstance(value, int) else row.show(settings) for row, value in values}
    return recorded | {"chat": settings.uses_chat}  # the value in effect, not `auto`


def from_json(values: Mapping[str, object], limits: Limits) -> tuple[Settings, list[str]]:
    """Settings from the values of a record, and a sentence for each value that is missing or not supported here."""
    settings = Settings()
    problems = [f"setting {name}: not known here" for name in values if name not in setting_fields()]
    for setting in setting_fields().values():
        try:
            value = values.get(setting.name, "")
            text = ("off", "on")[value] if isinstance(value, bool) else encodable(str(value))
            if not text:  # an empty text would toggle the setting
                raise UserError("not recorded.")
            settings = setting.change(settings, text, limits)
        except UserError as error:
            # The part after the semicolon advises what to type, which does not apply to a record.
            reason = str(error).partition(";")[0].rstrip(".")
            problems.append(f"setting {setting.name}: {reason}; it is {setting.show(settings)} instead")
    return settings, problems
