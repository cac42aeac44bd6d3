"""Settings: one frozen value per session. Each setting is one row: a field with everything that is known about it.

The command, its reply, its page of /help, completion, a flag, the settings in records, and the tables of
`utils/commands/README.md` follow from a row: see `utils.config.setting_table`.
"""

from dataclasses import dataclass, field
from typing import Any

from utils.bounds import (
    AUTO_GAMMA,
    ENGINES,
    FILLER_TOP_K,
    MAX_GAMMA,
    NGRAM_LIMIT,
    RULES,
    SEED,
    THREADS,
    WholeRange,
)
from utils.config.value_types import (
    COST_TABLE,
    DRAFTER_KINDS,
    GREEDY,
    ON_OFF,
    PROCESSOR,
    STORAGE,
    SYSTEM_PROMPT,
    ProcessorSpec,
    StorageSpec,
    ValueType,
    choice,
    number,
    number_or,
)
from utils.metrics.costs import Costs
from utils.pairs.request import LOADED


def _setting(default: Any, value_type: ValueType, group: str = "", summary: str = "", **row: Any) -> Any:
    """A row: see `utils.config.setting_table.Setting`. Without a group it has no command of its own."""
    return field(default=default, metadata=row | {"value_type": value_type, "group": group, "summary": summary})


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a user can change. A run uses a snapshot; commands make new snapshots."""

    speculative: bool = _setting(
        True,
        ON_OFF,
        "strategies",
        "speculative decoding with the drafter",
        text="Run speculative decoding: the drafter proposes tokens, and the target verifies them in one forward "
        "pass (Leviathan et al. 2023).",
        example=("", "speculative: off (was on)"),
        see_also=("drafter_kind", "gamma", "ngram", "target"),
    )
    ngram: bool = _setting(
        True,
        ON_OFF,
        "drafting",
        "n-gram assisted decoding; its storage",
        text="Run n-gram assisted decoding (NASD): drafts come from n-grams of the prompt, of the text so far and of "
        "the target's top tokens, which a storage counts; with 1 candidate only generated tokens. Its oldest n-grams "
        "are dropped first. /ngram keep also keeps the texts of suffix and chain.",
        example=("order 4", "ngram order: 4"),
        forms={"on": "run n-gram assisted decoding", "off": "do not run it"},
        see_also=("speculative", "hits"),
        rank=3,
    )
    target: bool = _setting(
        True,
        ON_OFF,
        "strategies",
        "the target alone, the baseline",
        text="Run the target alone. All speed-ups and comparisons of texts refer to this run.",
        example=("on",),
        see_also=("speculative", "speed-up", "text"),
    )
    drafter: bool = _setting(
        False,
        ON_OFF,
        "strategies",
        "the drafter alone",
        text="Run the drafter model alone, for comparison. Its text is its own.",
        example=("on",),
        see_also=("speculative", "target"),
    )
    beams: int = _setting(
        0,
        number(WholeRange(0, 16)),
        "strategies",
        "a beam search with N beams, 0 to 16",
        text="Run a beam search with the target and a length penalty. N is its number of beams, 1 to 16; 0 turns it "
        "off. Its text differs from the other strategies.",
        example=("4",),
        see_also=("target",),
    )
    gamma: int | None = _setting(
        None,
        number_or(number(WholeRange(0, MAX_GAMMA)), "auto"),
        "drafting",
        "maximum drafts per round, 0 to 63",
        text="The maximum number of tokens that are drafted before the target verifies them. With auto, every round "
        "drafts as many tokens as have the highest expected throughput, given the acceptance so far and the costs of "
        "drafting and verifying in the present context. It drafts nothing where a run could lose more than about 2 % "
        "of its time, and a drafter that is not used does not read the prompt.",
        example=("4",),
        forms={"N": "0 to 63; 0: no drafts", "auto": "as many as are likely to pay"},
        see_also=("whatif", "costs", "drafts/round"),
        rank=1,
    )
    drafter_kind: tuple[str, ...] = _setting(
        (LOADED,),
        DRAFTER_KINDS,
        "drafting",
        "what drafts; several kinds are compared",
        text="What drafts for the strategy speculative. Several kinds are run one after the other.",
        example=("loaded suffix",),
        forms={
            "loaded": "the drafter of the pair",
            "layers:K": "the first K layers of the target",
            "lookup": "prompt lookup",
            "suffix": "a suffix automaton of the texts",
            "chain": "suffix, then the drafter of the pair",
        },
        see_also=("load", "speculative", "race"),
        rank=2,
    )
    costs: Costs | None = _setting(
        None,
        COST_TABLE,
        "drafting",
        "costs of drafting and verifying",
        text="What verifying 1, 2, ... drafts costs in addition to a target forward over one token, and what one "
        "draft of each kind and reading 1,000 tokens of a prompt cost. The unit is one such target forward. They are "
        "measured on the loaded models, in a short and in a long context; /gamma auto, /why and /whatif depend on "
        "them.",
        example=(
            "measure",
            "costs: verifying k drafts costs 1 + (k=1: 0.19, 2: 0.22, 3: 0.26)",
            "target forwards; one draft by head 0.07",
        ),
        forms={
            "measure": "measure them on the loaded models",
            "verify V1 V2 ...; KIND C; read KIND C": "use these",
            "at N; ...; at N STEP; ...": "tables of two context lengths",
        },
        see_also=("gamma", "draft cost (c)", "verify cost (v)"),
    )
    length: int = _setting(
        128,
        number(WholeRange(1), limit="context"),
        "decoding",
        "maximum number of new tokens",
        text="The maximum number of new tokens of each answer, from 1 to the context length of the target. An answer "
        "also ends at an end token of the target.",
        example=("256",),
        see_also=("tokens", "turns"),
        rank=1,
    )
    processor: ProcessorSpec = _setting(
        GREEDY,
        PROCESSOR,
        "decoding",
        "temperature, top-k, top-p in one line",
        text="How the target's logits become the distribution that tokens are sampled from: temperature first, then "
        "top-k, then top-p.",
        example=("nucleus 0.8 0.95",),
        forms={
            "greedy": "[T]: the likeliest token",
            "multinomial": "T: sample at temperature T",
            "topk": "T K: the K likeliest tokens at temperature T",
            "nucleus": "T P: a probability mass of P at temperature T",
            "topknucleus": "T K P: both",
        },
        see_also=("temperature", "top_k", "top_p"),
    )
    seed: int = _setting(
        42,
        number(SEED),
        "decoding",
        "seed of every strategy, 0 to 2**32 - 1",
        text="The random seed of every run, 0 to 2**32 - 1. The same seed, settings and models give the same texts.",
        example=("7",),
        see_also=("temperature", "verify"),
        is_flag=True,
    )
    verify: str = _setting(
        "rejection",
        choice(RULES, "rule"),
        "drafting",
        "the rule that accepts drafts",
        text="All rules keep the target's distribution; under greedy decoding they are the same. block is the rule "
        "of Sun et al. 2024. coupled gives the text of the target alone for the same seed.",
        example=("coupled",),
        forms={
            "rejection": "accept each draft with probability min(1, p/q)",
            "block": "accept drafts jointly, at least as many",
            "coupled": "the same text as the target alone",
        },
        see_also=("lossless", "texts", "acceptance", "p/q"),
    )
    engine: str = _setting(
        "auto",
        choice(ENGINES, "engine"),
        "decoding",
        "how layers are computed",
        text="Alone it shows what was measured of each engine. auto gives up equal bits for more than 10 % of speed "
        "only. invariant: greedy texts are equal bit for bit. Results are kept for later.",
        example=("plain",),
        forms={
            "auto": "the fastest one, by measurement",
            "plain": "PyTorch unchanged",
            "invariant": "the logits do not depend on the verify width; compiled for the processor on CPUs",
            "cuda_graph": "forward passes are recorded once and replayed, on CUDA devices",
            "test": "test and measure all engines again",
        },
        see_also=("threads", "audit"),
        fact="engine now",
        is_flag=True,
    )
    threads: int = _setting(
        0,
        number_or(number(THREADS), "auto", value=0),
        "decoding",
        "number of CPU threads",
        text="The number of CPU threads, at most the number of cores; auto: the fastest number, unless "
        "OMP_NUM_THREADS is set.",
        example=("1",),
        forms={"N": f"{THREADS}", "auto": "the fastest number"},
        see_also=("engine",),
        fact="engine now",
        is_flag=True,
    )
    cache: bool = _setting(
        True,
        ON_OFF,
        "decoding",
        "keep keys and values between rounds",
        text="Whether keys and values of earlier tokens are kept. off computes all tokens again in every round: the "
        "text is the same, but every strategy is slow.",
        example=("", "cache: off (was on)"),
        forms={"on": "keep them", "off": "compute all tokens again in every round"},
        see_also=("pair", "target"),
    )
    chat: bool | None = _setting(
        None,
        choice({"on": True, "off": False, "auto": None}, "value"),
        "prompts",
        "put prompts into the chat template",
        text="Whether a prompt is put into the chat template of the tokenizer. Without a template, the model "
        "continues the prompt as it stands. auto is decided anew by every /load.",
        example=("off",),
        forms={"on": "use it", "off": "send prompts as they stand", "auto": "use it if there is one"},
        see_also=("system", "turns"),
        fact="chat now",
    )
    system: str | None = _setting(
        None,
        SYSTEM_PROMPT,
        "prompts",
        "system prompt of the chat template",
        text="The system prompt of every prompt that is put into the chat template.",
        example=("Answer in one sentence.",),
        forms={"TEXT": "a system prompt", "none": "an empty one", "default": "the one of the chat template"},
        see_also=("chat",),
        needs="chat",
    )
    turns: bool = _setting(
        False,
        ON_OFF,
        "prompts",
        "continue the conversation",
        text="Whether each prompt continues the conversation. Every strategy continues its own answers; a turn that "
        "was interrupted or failed is not kept.",
        example=("on",),
        forms={"on": "continue it with each prompt", "off": "begin a new one with each prompt", "new": "forget it"},
        see_also=("chat", "system"),
        needs="chat",
    )
    special: bool = _setting(
        False,
        ON_OFF,
        "prompts",
        "read names of special tokens in prompts",
        text="Whether names such as <|im_end|> in a prompt become the special tokens that they name. off reads them "
        "as text.",
        example=("on",),
        see_also=("chat",),
    )
    # Subcommands of /ngram set these four: `utils.config.setting_table.NGRAM_PARTS`.
    ngram_storage: StorageSpec = _setting(StorageSpec("basic", 3), STORAGE)
    ngram_limit: int = _setting(1_000_000, number(NGRAM_LIMIT))
    top_k_filler: int = _setting(3, number(FILLER_TOP_K))
    reset_in_between: bool = _setting(True, ON_OFF)
    debug: str = _setting(
        "off",
        choice(("on", "off", "full"), "level"),
        "results",
        "show every round while it runs",
        text="A line for each round has its drafts (+ accepted, - rejected), the target's token (= correction, * "
        "bonus) and its time; rounds without drafts share a line. full: also p/q as colours and shapes, why each "
        "draft was rejected, and where n-grams and matches were found.",
        example=("full",),
        forms={"on": "a line per round", "off": "the texts only", "full": "also p/q, and why drafts were rejected"},
        see_also=("texts", "p/q", "rank", "hits"),
        rank=4,
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
