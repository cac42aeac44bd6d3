"""Settings: one frozen value per session, every field with its command, its kind (bounds and parser) and its help.

The slash commands, /help, completions and the JSON record are derived from this table.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from utils.bounds import AUTO_GAMMA, ENGINES, LOADED, MAX_FILLER, MAX_GRAMS, MAX_SEED, RULES
from utils.config.draft_value_types import CostTable, DraftCount, DrafterWords
from utils.config.value_types import (
    Choice,
    Kind,
    Levels,
    Limits,
    ProcessorKind,
    StorageKind,
    StorageSpec,
    SystemPrompt,
    ThreadCount,
    Toggle,
    Whole,
)
from utils.errors import UserError, one_of
from utils.logits_processor import GreedyProcessor, LogitsProcessor
from utils.metrics.costs import Costs
from utils.text import encodable


def _setting(default: Any, kind: Kind, meaning: str, *, command: str = "", needs: str = "", fact: str = "") -> Any:
    """needs: a toggle without which the field has no effect. fact: what /show calls that which the setting came to."""
    return field(
        default=default, metadata={"kind": kind, "help": meaning, "command": command, "needs": needs, "fact": fact}
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a user can tune. A run works on the value it was given; commands make new ones."""

    speculative: bool = _setting(True, Toggle(), "run speculative decoding with the drafter model")
    ngram: bool = _setting(True, Toggle(), "run n-gram assisted decoding (NASD)")
    target: bool = _setting(True, Toggle(), "run the target alone: the baseline of every comparison")
    drafter: bool = _setting(False, Toggle(), "run the drafter alone")
    beams: int = _setting(0, Whole(0, 16), "beams of a beam search with the target; 0 leaves it out")
    gamma: int | None = _setting(
        None,
        DraftCount(),
        "drafts per round, 0 to 63; 0: plain decoding through the loop; auto: as many as are likely to pay",
    )
    drafter_kind: tuple[str, ...] = _setting(
        (LOADED,), DrafterWords(), "what drafts for speculative decoding; several run side by side"
    )
    costs: Costs | None = _setting(
        None, CostTable(), "what drafts and windows take in plain steps; auto gamma goes by it"
    )
    length: int = _setting(35, Whole(1, limit="context"), "most new tokens, 1 to the target's context")
    processor: LogitsProcessor = _setting(
        GreedyProcessor(), ProcessorKind(), "greedy [T] | multinomial T | topk T K | nucleus T P | topknucleus T K P"
    )
    seed: int = _setting(42, Whole(0, MAX_SEED), "every strategy starts from this seed, 0 to 2**32 - 1")
    verify: str = _setting(
        "rejection",
        Choice(RULES, "rule"),
        "rejection: p/q; block: p/q over the whole draft; coupled: target-only's noise, so its very text",
    )
    engine: str = _setting(
        "auto",
        Choice(ENGINES, "engine"),
        "invariant: logits do not depend on the window they are computed in; plain: PyTorch as it comes; auto: the faster one",
        fact="engine now",
    )
    threads: int = _setting(0, ThreadCount(), "CPU threads; auto: as many as help", fact="engine now")
    cache: bool = _setting(True, Toggle(), "keep keys and values; off recomputes everything and gives the same text")
    chat: bool = _setting(True, Toggle(), "put the prompt into the tokenizer's chat template")
    system: str | None = _setting(None, SystemPrompt(), "system prompt of the chat template", needs="chat")
    turns: bool = _setting(False, Toggle(), "go on with the conversation: every strategy keeps its own", needs="chat")
    special: bool = _setting(
        False, Toggle(), "read the names of special tokens in a prompt, such as <|im_end|>, as those tokens"
    )
    ngram_storage: StorageSpec = _setting(
        StorageSpec("basic", 3), StorageKind(), "n-gram storage and its order, 2 to 16", command="set_ngramstorage"
    )
    ngram_limit: int = _setting(
        1_000_000, Whole(1, MAX_GRAMS), "most n-grams the storage holds; beyond it the oldest are forgotten"
    )
    top_k_filler: int = _setting(
        3, Whole(1, MAX_FILLER), "target's top tokens entered per position, 1 to 64; 1: only what was generated"
    )
    reset_in_between: bool = _setting(True, Toggle(), "empty the n-gram storage before each prompt")
    debug: str = _setting(
        "off",
        Levels(("on", "off", "full")),
        "on: show every round, + accepted, - rejected, = corrected, * bonus; full: and why drafts fell, and where hits came from",
    )

    @property
    def most_drafts(self) -> int:
        """Of a round."""
        return AUTO_GAMMA if self.gamma is None else self.gamma

    @property
    def keeps_turns(self) -> bool:
        """Whether prompts go on with a conversation."""
        return self.turns and self.chat


def setting_fields() -> dict[str, Field[Any]]:
    """The fields of Settings by the name of their command."""
    return {entry.metadata["command"] or entry.name: entry for entry in fields(Settings)}


def shown(settings: Settings, entry: Field[Any]) -> str:
    """A field's value as one would type it."""
    return str(entry.metadata["kind"].show(getattr(settings, entry.name)))


def changed(settings: Settings, entry: Field[Any], text: str, limits: Limits) -> Settings:
    """New settings with one field parsed from text. Raises UserError; the old settings are what they were."""
    value = entry.metadata["kind"].parse(text, getattr(settings, entry.name), limits)
    return replace(settings, **{entry.name: value})


def configured(settings: Settings, given: Mapping[str, str], limits: Limits) -> Settings:
    """New settings with values by the names of their commands, as typed. Raises UserError for one that is none."""
    entries = setting_fields()
    for name, text in given.items():
        entry = entries[one_of(name, tuple(entries), "setting")]
        try:
            settings = changed(settings, entry, text, limits)
        except UserError as error:
            raise UserError(f"settings.{name}: {error}") from error
    return settings


def fitted(settings: Settings, limits: Limits) -> Settings:
    """The same settings, but for those that another target does not allow: they are what they are at first."""
    for entry in setting_fields().values():
        try:
            changed(settings, entry, shown(settings, entry), limits)
        except UserError:
            usual: dict[str, Any] = {entry.name: entry.default}
            settings = replace(settings, **usual)
    return settings


def as_json(settings: Settings) -> dict[str, Any]:
    """Plain values: numbers and booleans as they are, everything else as one would type it."""
    return {entry.name: _plain(settings, entry) for entry in fields(settings)}


def restored(given: Mapping[str, Any], limits: Limits) -> tuple[Settings, list[str]]:
    """Settings from what `as_json` made of some; and a sentence for each that cannot be taken over and is what it is at first."""
    settings = Settings()
    lost = [f"setting {name}: not known here" for name in given if name not in as_json(settings)]
    for entry in fields(Settings):
        try:
            if entry.name not in given:
                raise UserError("not recorded.")
            settings = changed(settings, entry, _typed(given[entry.name], entry), limits)
        except UserError as error:
            lost.append(
                f"setting {entry.name}: {str(error).partition(';')[0].rstrip('.')}; it is {shown(settings, entry)} instead"
            )
    return settings, lost


def _typed(value: Any, entry: Field[Any]) -> str:
    """A plain value as one would type it. Raises UserError for one that `_plain` makes of no value."""
    if isinstance(value, bool) and isinstance(entry.metadata["kind"], Levels):
        return Toggle().show(value)  # it was a toggle once
    if (
        not isinstance(value, bool | int | str)
        or isinstance(value, bool) != isinstance(entry.default, bool)
        or value == ""
    ):
        raise UserError(f"{str(value)[:40]!r} is no value of it.")
    usual = value == entry.default  # which need not be what one may type: 0 threads are "auto"
    return str(entry.metadata["kind"].show(value)) if usual or isinstance(value, bool) else encodable(str(value))


def _plain(settings: Settings, entry: Field[Any]) -> Any:
    value = getattr(settings, entry.name)
    return value if isinstance(value, bool | int) else shown(settings, entry)
