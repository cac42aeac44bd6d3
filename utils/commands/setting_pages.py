"""What /help says about the commands that change one setting: group, place on the first page, summary and page.

Values, bounds and defaults are in `utils.config`; a setting without an entry here is hidden.
"""

from utils.bounds import ENGINES
from utils.commands.drafting_pages import DRAFTING_HELP
from utils.commands.registry import Page
from utils.commands.setting_help import SettingHelp

SETTING_HELP = DRAFTING_HELP | {
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
