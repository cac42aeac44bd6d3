"""What /help says about the settings of drafting and verification: see utils.commands.setting_pages."""

from utils.commands.registry import Page
from utils.commands.setting_help import SettingHelp

DRAFTING_HELP = {
    "gamma": SettingHelp(
        "drafting",
        "maximum number of drafts per round",
        Page(
            "The maximum number of tokens that are drafted before the target verifies them. With auto, every round "
            "drafts as many tokens as have the highest expected throughput, given the acceptance so far and the costs "
            "of drafting and verifying in the present context. It drafts nothing where a run could lose more than "
            "about 2 % of its time, and a drafter that is not used does not read the prompt.",
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
    "costs": SettingHelp(
        "drafting",
        "costs of drafting and verifying",
        Page(
            "What verifying 1, 2, ... drafts costs in addition to a target forward over one token, and what one draft "
            "of each kind and reading 1,000 tokens of a prompt cost. The unit is one such target forward. They are "
            "measured on the loaded models, in a short and in a long context; "
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
}
