"""Settings: one frozen value per session. Every field declares its command, its value type and its help text.

The slash commands, /help, completions and the settings in records are derived from this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from utils.bounds import AUTO_GAMMA, ENGINES, FILLER_TOP_K, MAX_NGRAMS, MAX_SEED, RULES
from utils.config.draft_value_types import CostTable, DraftCount, DrafterKinds
from utils.config.processor_value_type import ProcessorType
from utils.config.value_types import (
    Choice,
    Limits,
    StorageSpec,
    StorageType,
    SystemPrompt,
    ThreadCount,
    Toggle,
    ToggleOrAuto,
    ToggleOrChoice,
    ValueType,
    WholeNumber,
)
from utils.errors import UserError
from utils.logits_processor import GreedyProcessor, LogitsProcessor
from utils.metrics.costs import Costs
from utils.pairs.request import LOADED
from utils.text import encodable


def _setting(default: Any, value_type: ValueType, help: str, **options: str) -> Any:
    return field(default=default, metadata={"value_type": value_type, "help": help, **options})


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a user can change. A run works on a snapshot; commands make new snapshots."""

    speculative: bool = _setting(True, Toggle(), "run speculative decoding with the drafter model")
    ngram: bool = _setting(True, Toggle(), "run n-gram assisted decoding (NASD)")
    target: bool = _setting(True, Toggle(), "run the target alone, the baseline of every comparison")
    drafter: bool = _setting(False, Toggle(), "run the drafter alone")
    beams: int = _setting(0, WholeNumber(0, 16), "number of beams of a beam search with the target; 0: no beam search")
    gamma: int | None = _setting(
        None,
        DraftCount(),
        "maximum number of drafts per round, 0 to 63; auto: the number with the highest expected throughput",
    )
    drafter_kind: tuple[str, ...] = _setting(
        (LOADED,), DrafterKinds(), "drafters for speculative decoding; several are run one after the other"
    )
    costs: Costs | None = _setting(
        None,
        CostTable(),
        "costs of verifying and drafting, in target forwards; auto gamma depends on them",
    )
    length: int = _setting(
        128, WholeNumber(1, limit="context"), "maximum number of new tokens, 1 to the target's context length"
    )
    processor: LogitsProcessor = _setting(
        GreedyProcessor(), ProcessorType(), "greedy [T] | multinomial T | topk T K | nucleus T P | topknucleus T K P"
    )
    seed: int = _setting(42, WholeNumber(0, MAX_SEED), "random seed of every strategy, 0 to 2**32 - 1")
    verify: str = _setting(
        "rejection",
        Choice(RULES, "rule"),
        "rejection: accept each draft by p/q; block: accept them jointly; coupled: give the target's own text",
    )
    engine: str = _setting(
        "auto",
        Choice(ENGINES, "engine"),
        "plain: PyTorch unchanged; invariant, openvino: equal bits; cuda_graph: for GPUs; auto: the fastest",
        fact="engine now",
    )
    threads: int = _setting(0, ThreadCount(), "number of CPU threads; auto: the fastest number", fact="engine now")
    cache: bool = _setting(True, Toggle(), "keep keys and values; off: recompute everything, with the same text")
    chat: bool | None = _setting(
        None,
        ToggleOrAuto(),
        "put the prompt into the tokenizer's chat template; auto: if it has one",
        fact="chat now",
    )
    system: str | None = _setting(None, SystemPrompt(), "system prompt of the chat template", needs="chat")
    turns: bool = _setting(
        False, Toggle(), "continue the conversation with each prompt; every strategy keeps its own", needs="chat"
    )
    special: bool = _setting(
        False, Toggle(), "read names of special tokens in a prompt, such as <|im_end|>, as these tokens"
    )
    ngram_storage: StorageSpec = _setting(
        StorageSpec("basic", 3), StorageType(), "n-gram storage and its order, 2 to 16", command="set_ngramstorage"
    )
    ngram_limit: int = _setting(
        1_000_000, WholeNumber(1, MAX_NGRAMS), "maximum number of n-grams in the storage; the oldest are dropped first"
    )
    top_k_filler: int = _setting(
        3,
        WholeNumber(FILLER_TOP_K.low, FILLER_TOP_K.high),
        "number of the target's top tokens stored at each position, 1 to 64; 1: only the generated token",
    )
    reset_in_between: bool = _setting(True, Toggle(), "empty the n-gram storage before each prompt")
    debug: str = _setting(
        "off",
        ToggleOrChoice(("on", "off", "full")),
        "on: show every round (+ accepted, - rejected, = corrected, * bonus); full: also why drafts were rejected",
    )

    # Not a setting: whether the loaded tokenizer has a chat template. The session sets it.
    chat_template: bool = True

    @property
    def uses_chat(self) -> bool:
        """Whether prompts are put into a chat template."""
        return self.chat_template and self.chat is not False

    @property
    def max_drafts(self) -> int:
        """Maximum number of drafts per round."""
        return AUTO_GAMMA if self.gamma is None else self.gamma

    @property
    def keeps_conversation(self) -> bool:
        """Whether each prompt continues the conversation."""
        return self.turns and self.uses_chat


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of Settings.

    needs: a toggle without which it has no effect. fact: the label in /show of the value that is in effect.
    """

    name: str
    default: Any
    value_type: ValueType
    help: str
    command: str = ""
    needs: str = ""
    fact: str = ""

    @property
    def usage(self) -> str:
        """The argument in /help."""
        return self.value_type.usage

    @property
    def words(self) -> tuple[str, ...]:
        """Completions of the argument."""
        return self.value_type.words

    @property
    def is_switch(self) -> bool:
        """Whether it is switched between on and off without an argument."""
        return isinstance(self.value_type, Toggle | ToggleOrChoice)

    def show(self, settings: Settings) -> str:
        """The value as it would be typed."""
        return self.value_type.show(getattr(settings, self.name))

    def describe(self, settings: Settings) -> str:
        """The value as it is read, where that differs from what is typed."""
        value = getattr(settings, self.name)
        return value.text if isinstance(value, Costs) else self.show(settings)

    def has_effect(self, settings: Settings) -> bool:
        """Whether the setting that this one needs is on."""
        return self.needs != "chat" or settings.uses_chat

    def change(self, settings: Settings, text: str, limits: Limits) -> Settings:
        """New settings with the value that `text` describes. Raises UserError if it is not valid."""
        return replace(settings, **{self.name: self.value_type.parse(text, getattr(settings, self.name), limits)})


@cache
def setting_fields() -> Mapping[str, Setting]:
    """The fields of Settings by the names of their commands."""
    settings = (Setting(entry.name, entry.default, **entry.metadata) for entry in fields(Settings) if entry.metadata)
    return {setting.command or setting.name: setting for setting in settings}


def reset_unsupported(settings: Settings, limits: Limits) -> Settings:
    """New settings in which values that the loaded target does not support are reset to their defaults."""
    for setting in setting_fields().values():
        try:
            # A value is supported if what `show` writes can be parsed under the new limits.
            setting.change(settings, setting.show(settings), limits)
        except UserError:
            settings = replace(settings, **{setting.name: setting.default})
    return settings


def as_json(settings: Settings) -> dict[str, bool | int | str]:
    """Settings for a record: numbers and booleans as they are, everything else as it would be typed."""
    values = ((setting, getattr(settings, setting.name)) for setting in setting_fields().values())
    recorded = {
        setting.name: value if isinstance(value, bool | int) else setting.show(settings) for setting, value in values
    }
    return recorded | {"chat": settings.uses_chat}  # what was done, not `auto`


def from_json(values: Mapping[str, object], limits: Limits) -> tuple[Settings, list[str]]:
    """Settings from the values of a record, and a sentence for each value that is missing or not supported here."""
    settings, names = Settings(), {setting.name for setting in setting_fields().values()}
    problems = [f"setting {name}: not known here" for name in values if name not in names]
    for setting in setting_fields().values():
        try:
            if setting.name not in values:
                raise UserError("not recorded.")
            settings = setting.change(settings, _typed(values[setting.name], setting), limits)
        except UserError as error:
            # The part after the semicolon advises what to type, which does not apply to a record.
            reason = str(error).partition(";")[0].rstrip(".")
            problems.append(f"setting {setting.name}: {reason}; it is {setting.show(settings)} instead")
    return settings, problems


def _typed(value: object, setting: Setting) -> str:
    """A recorded value as it would be typed. Raises UserError for a value that `as_json` does not write."""
    if isinstance(value, bool) and isinstance(setting.value_type, ToggleOrChoice):
        return Toggle().show(value)  # older records have true and false
    if (
        not isinstance(value, bool | int | str)
        or isinstance(value, bool) != isinstance(setting.value_type, Toggle)
        # An empty text would switch a toggle instead of setting it.
        or value == ""
    ):
        raise UserError(f"{str(value)[:40]!r} is not a valid value.")
    if isinstance(value, bool) or value == setting.default:  # a default may be typed differently: 0 threads are "auto"
        return setting.value_type.show(value)
    return encodable(str(value))
