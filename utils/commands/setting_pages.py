"""What /help says about the commands that change one setting: group, place on the first page, summary and page.

Values, bounds and defaults are in `utils.config`; a setting without an entry here is hidden.
"""

from dataclasses import dataclass

from utils.bounds import ENGINES
from utils.commands.registry import Page


@dataclass(frozen=True, slots=True)
class SettingHelp:
    """The part of a Command that /help shows."""

    group: str
    summary: str
    page: Page
    rank: int = 0
    usage: str = ""  # instead of that of the value type, if it is long


SETTING_HELP = {
    "gamma": SettingHelp(
        "drafting",
        "maximum number of drafts per round",
        Page(
            "The maximum number of tokens that are drafted before the target verifies them. With auto, every round "
            "drafts as many tokens as have the highest expected throughput, given the acceptance so far and the costs "
            "of drafting and verifying.",
            ("> /gamma 4", "gamma: 4"),
            ("/gamma N       0 to 63; 0: no drafts", "/gamma auto    as many as are likely to pay"),
            ("whatif", "costs", "drafts/round"),
        ),
        rank=1,
    ),
    "drafter_kind": SettingHelp(
        "drafting",
        "what drafts; several kinds are compared",
        Page(
            "What drafts for the strategy speculative: loaded (the pair's drafter), model, head (if it reads hidden "
            "states, in any format), layers:K (the first K layers of the target), lookup (prompt lookup), suffix (an "
            "automaton) or chain (suffix, then the pair's drafter). Several kinds are run one after the other.",
            ("> /drafter_kind loaded suffix", "drafter_kind: loaded suffix"),
            see_also=("load", "speculative", "race"),
        ),
        rank=2,
    ),
    "length": SettingHelp(
        "decoding",
        "maximum number of new tokens",
        Page(
            "The maximum number of new tokens of each answer, from 1 to the context length of the target. An answer "
            "also ends at an end token of the target.",
            ("> /length 256", "length: 256"),
            see_also=("tokens", "turns"),
        ),
        rank=1,
    ),
    "temperature": SettingHelp(
        "decoding",
        "0: greedy; above 0: sample",
        Page(
            "The temperature of the processor, 0 to 100. 0 is greedy decoding, which has no top-k and top-p. Any other "
            "temperature keeps the top-k and top-p that are set.",
            ("> /temperature 0.7", "temperature: 0.7; processor: multinomial 0.7"),
            see_also=("top_p", "top_k", "processor", "seed", "verify"),
        ),
        rank=2,
    ),
    "debug": SettingHelp(
        "results",
        "show every round while it runs",
        Page(
            "on: a line for each round with its drafts (+ accepted, - rejected), the target's token (= correction, * "
            "bonus) and its time. full: also p/q as colours, and why each draft was rejected.",
            ("> /debug full", "debug: full"),
            ("/debug on|off|full", "/debug    switches between on and off"),
            ("texts", "p/q", "rank", "hits"),
        ),
        rank=4,
    ),
    "speculative": SettingHelp(
        "strategies",
        "speculative decoding with the drafter",
        Page(
            "Run speculative decoding: the drafter proposes tokens, and the target verifies them in one forward pass "
            "(Leviathan et al. 2023).",
            ("> /speculative", "speculative: off (was on)"),
            see_also=("drafter_kind", "gamma", "ngram", "target"),
        ),
    ),
    "target": SettingHelp(
        "strategies",
        "the target alone, the baseline",
        Page(
            "Run the target alone. All speed-ups and comparisons of texts refer to this run.",
            ("> /target on", "target: on"),
            see_also=("speculative", "speed-up", "text"),
        ),
    ),
    "drafter": SettingHelp(
        "strategies",
        "the drafter alone",
        Page(
            "Run the drafter model alone, for comparison. Its text is its own.",
            ("> /drafter on", "drafter: on"),
            see_also=("speculative", "target"),
        ),
    ),
    "beams": SettingHelp(
        "strategies",
        "a beam search with the target",
        Page(
            "Run a beam search with the target and a length penalty. N is its number of beams, 1 to 16; 0 turns it "
            "off. Its text differs from the other strategies.",
            ("> /beams 4", "beams: 4"),
            see_also=("target",),
        ),
    ),
    "costs": SettingHelp(
        "drafting",
        "costs of drafting and verifying",
        Page(
            "What verifying 1, 2, ... drafts costs in addition to a target forward over one token, and what one draft "
            "of each kind costs. The unit is one such target forward. They are measured on the loaded models; "
            "/gamma auto, /why and /whatif depend on them.",
            (
                "> /costs measure",
                "costs: verifying k drafts costs 1 + (k=1: 0.19, 2: 0.22, 3: 0.26)",
                "target forwards; one draft by head 0.07",
            ),
            ("/costs            shows them", "/costs measure", "/costs verify V1 V2 ...; KIND C    uses these"),
            ("gamma", "draft cost (c)", "verify cost (v)"),
        ),
    ),
    "verify": SettingHelp(
        "drafting",
        "the rule that accepts drafts",
        Page(
            "rejection accepts each draft with probability min(1, p/q). block accepts drafts jointly (Sun et al. 2024) "
            "and accepts at least as many. coupled gives the text of the target alone for the same seed. All three "
            "keep the target's distribution; under greedy decoding they are the same.",
            ("> /verify coupled", "verify: coupled"),
            ("/verify rejection|block|coupled",),
            ("lossless", "texts", "acceptance", "p/q"),
        ),
        usage="RULE",
    ),
    "processor": SettingHelp(
        "decoding",
        "temperature, top-k, top-p in one line",
        Page(
            "How the target's logits become the distribution that tokens are sampled from: temperature first, then "
            "top-k, then top-p.",
            ("> /processor nucleus 0.8 0.95", "processor: nucleus 0.8 0.95"),
            (
                "/processor greedy [T]           the likeliest token",
                "/processor multinomial T        temperature T",
                "/processor topk T K             the K likeliest tokens",
                "/processor nucleus T P          a probability mass of P",
                "/processor topknucleus T K P    both",
            ),
            ("temperature", "top_k", "top_p"),
        ),
    ),
    "top_k": SettingHelp(
        "decoding",
        "sample from the K likeliest tokens",
        Page(
            "Sample from the K most likely tokens only; off or 0: from all. The temperature and top-p stay. With "
            "greedy decoding, which has no top-k, the temperature becomes 1.",
            ("> /top_k 40", "top_k: 40; processor: topk 0.7 40"),
            see_also=("temperature", "top_p", "processor"),
        ),
    ),
    "top_p": SettingHelp(
        "decoding",
        "sample from a probability mass of P",
        Page(
            "Sample from the fewest tokens with a total probability of at least P, above 0 and at most 1; off or 1: "
            "from all. The temperature and top-k stay. With greedy decoding, which has no top-p, the temperature "
            "becomes 1.",
            ("> /top_p 0.95", "top_p: 0.95; processor: nucleus 0.7 0.95"),
            see_also=("temperature", "top_k", "processor"),
        ),
    ),
    "seed": SettingHelp(
        "decoding",
        "random seed of every strategy",
        Page(
            "The random seed of every run, 0 to 2**32 - 1. The same seed, settings and models give the same texts.",
            ("> /seed 7", "seed: 7"),
            see_also=("temperature", "verify"),
        ),
    ),
    "engine": SettingHelp(
        "decoding",
        "how layers are computed",
        Page(
            "Alone it shows what was measured of each engine. auto: the fastest; equal bits are given up for more than "
            "10 % of speed only. invariant, openvino: greedy texts are equal bit for bit. Results are kept for later.",
            ("> /engine plain", "engine: plain"),
            (f"/engine {'|'.join(ENGINES)}", "/engine test    tests and measures again"),
            ("threads", "audit"),
        ),
        usage="NAME",
    ),
    "threads": SettingHelp(
        "decoding",
        "number of CPU threads",
        Page(
            "The number of CPU threads, at most the number of cores; auto: the fastest number, unless OMP_NUM_THREADS "
            "is set.",
            ("> /threads 1", "threads: 1"),
            see_also=("engine",),
        ),
    ),
    "cache": SettingHelp(
        "decoding",
        "keep keys and values between rounds",
        Page(
            "Whether keys and values of earlier tokens are kept. off computes all tokens again in every round: the "
            "text is the same, but every strategy is slow.",
            ("> /cache", "cache: off (was on)"),
            see_also=("pair", "target"),
        ),
    ),
    "chat": SettingHelp(
        "prompts",
        "put prompts into the chat template",
        Page(
            "Whether a prompt is put into the chat template of the tokenizer; auto: if it has one. Without a template, "
            "the model continues the prompt as it stands.",
            ("> /chat off", "chat: off"),
            see_also=("system", "turns"),
        ),
    ),
    "system": SettingHelp(
        "prompts",
        "system prompt of the chat template",
        Page(
            "The system prompt. none: an empty one; default: the one of the chat template.",
            ("> /system Answer in one sentence.", "system: Answer in one sentence."),
            ("/system TEXT|none|default",),
            ("chat",),
        ),
        usage="TEXT",
    ),
    "special": SettingHelp(
        "prompts",
        "read names of special tokens in prompts",
        Page(
            "Whether names such as <|im_end|> in a prompt become the special tokens that they name. off reads them as "
            "text.",
            ("> /special on", "special: on"),
            see_also=("chat",),
        ),
    ),
}
