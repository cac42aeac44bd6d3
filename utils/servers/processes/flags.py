"""The settings of other programs for a way of drafting. It is the only place with their names.

They were read in the sources of vLLM 0.32, SGLang 0.5.23 and transformers 5.24, and in the help of llama.cpp of October
2026. /server start needs the flags of one program; /verdict and /server load end with those of all.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from utils.errors import UserError
from utils.pairs.request import HEAD, LAYERS, MODEL, PARD

LLAMA, VLLM, SGLANG, TRANSFORMERS = "llama.cpp", "vllm", "sglang", "transformers"
TITLES = {VLLM: "vLLM", SGLANG: "SGLang", LLAMA: LLAMA, TRANSFORMERS: TRANSFORMERS}
LOOKUP, SUFFIX = "lookup", "suffix"
MATCHES = 2, 5  # tokens of the n-grams that lookup searches for, at least and at most
EAGLE, PEAGLE, DFLASH, DSPARK, OWN, GEMMA = "EAGLE-3", "P-EAGLE", "DFlash", "DSpark", "MTP", "Gemma-4-assistant"
DFLASH2 = "DFlash2"  # whose files say what they are, so its word is that of DFlash
# The words of each program for drafter kinds, which are named as in records. A kind without one is not supported.
WORDS: Mapping[str, Mapping[str, str]] = {
    VLLM: {
        **{MODEL: "draft_model", PARD: "draft_model", EAGLE: "eagle3", PEAGLE: "eagle3", DFLASH: "dflash"},
        **{DSPARK: "dspark", DFLASH2: "dflash", OWN: "mtp", GEMMA: "mtp", LOOKUP: "ngram", SUFFIX: "suffix"},
    },
    SGLANG: {
        **{MODEL: "STANDALONE", EAGLE: "EAGLE3", DFLASH: "DFLASH", DSPARK: "DSPARK", OWN: "NEXTN", GEMMA: "NEXTN"},
        **{DFLASH2: "DFLASH", LOOKUP: "NGRAM"},
    },
    LLAMA: {
        **{MODEL: "draft-simple", EAGLE: "draft-eagle3", DFLASH: "draft-dflash", DSPARK: "draft-dspark"},
        **{DFLASH2: "draft-dflash", OWN: "draft-mtp", GEMMA: "draft-mtp", LOOKUP: "ngram-simple"},
    },
    TRANSFORMERS: {MODEL: "model", GEMMA: "model", OWN: "mtp", LOOKUP: "lookup", LAYERS: "layers"},
}
PARALLEL = (PARD, PEAGLE)  # kinds that draft all tokens of a round at once, for which vLLM needs a flag of its own
CHAINS = ("EAGLE3", "NEXTN")  # the words of SGLang whose length may depend on the load
# How sampled drafts are verified. SGLang's flags exist for some words only.
RULES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    SGLANG: {"rejection": CHAINS, "block": (*CHAINS, "DFLASH", "DSPARK")},
    VLLM: {"rejection": (), "block": ()},
    LLAMA: {"rejection": ()},
    TRANSFORMERS: {"rejection": ()},
}
QUANTIZED: Mapping[str, Mapping[str, str]] = {
    VLLM: {"int8": "int8_per_channel_weight_only"},
    SGLANG: {"nf4": "bitsandbytes"},
    LLAMA: {},  # a GGUF file has its own format
    TRANSFORMERS: {
        **{bits: f'QuantoConfig(weights="{bits}")' for bits in ("int8", "int4")},
        "bnb-int8": "BitsAndBytesConfig(load_in_8bit=True)",
        "nf4": 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")',
    },
}
OWN_QUANTIZATIONS = frozenset(QUANTIZED[TRANSFORMERS])  # others are stored in checkpoints, and need no flag
SCHEDULE_FILE = "draft_lengths.json"
HEADING = "Settings for other programs:"
NO_SETTING = "{} has no setting for {}."
OWN_HEAD = "`python -m sampling.distill` trains a drafter that vLLM and SGLang load."


@dataclass(frozen=True, slots=True)
class Speculation:
    """What drafts for a target, and how drafts are verified.

    `kind` is a drafter kind as in records, and `drafter` the name of its model, if it has one of its own. `matches` are
    the shortest and the longest n-gram that a lookup searches for. `rule` is empty under greedy decoding. `translates`
    is True if the drafter has another tokenizer. `schedule` has (first, last, drafts) for numbers of concurrent
    requests.
    """

    kind: str
    drafts: int
    drafter: str = ""
    matches: tuple[int, int] = MATCHES
    rule: str = ""
    quantize: str = "none"
    drafter_quantize: str = "none"
    translates: bool = False
    schedule: tuple[tuple[int, int, int], ...] = ()

    def word(self, program: str) -> str | None:
        """The program's word for the kind, or None if it is not supported there."""
        kind = LAYERS if self.kind.startswith(LAYERS) else self.kind
        other = self.translates and program in (SGLANG, LLAMA)
        separate = kind == OWN and self.drafter and program == TRANSFORMERS
        return None if other or separate else WORDS[program].get(kind)

    def missing(self, program: str) -> list[str]:
        word = self.word(program)
        if word is None:
            return [f"drafts of this kind ({self.kind}{' with another tokenizer' * self.translates})"]
        unknown = OWN_QUANTIZATIONS - set(QUANTIZED[program])
        has_schedule = program == VLLM or (program == SGLANG and word in CHAINS)
        missing = {
            f"the rule {self.rule}": self.samples and not self.has_rule(program, word),
            f"{self.quantize} weights": self.quantize in unknown,
            f"{self.drafter_quantize} weights": self.drafter_quantize in unknown,
            "draft lengths that depend on the load": self.schedule and not has_schedule,
        }
        return [what for what, applies in missing.items() if applies]

    @property
    def samples(self) -> bool:
        """Whether drafts are sampled from a distribution, so that the rule matters."""
        return bool(self.rule) and self.kind not in (LOOKUP, SUFFIX)

    def has_rule(self, program: str, word: str) -> bool:
        """Whether the program can verify sampled drafts of this kind by the rule."""
        words = RULES[program].get(self.rule)
        return words is not None and (not words or word in words) and not (self.translates and program == VLLM)


def draft_flags(program: str, found: Speculation, word: str = "") -> list[str]:
    """The words of the program's command line. `word` is its word for the kind, if WORDS is not to choose it.

    Raises UserError if it does not support this kind of drafter.
    """
    if not (word := word or found.word(program) or ""):
        raise UserError(NO_SETTING.format(TITLES[program], found.missing(program)[0]))
    return FLAGS[program](found, word)


def settings_elsewhere(found: Speculation) -> list[str]:
    """A line to copy for each program, and a sentence for what it has no setting for. None for an unknown kind."""
    if not found.kind:
        return []
    lines = [HEADING]
    for program, title in TITLES.items():
        missing = ", ".join(found.missing(program))
        if word := found.word(program):
            is_other = found.drafter and found.drafter.endswith(".gguf") != (program == LLAMA)
            own = "DRAFTER.gguf" if program == LLAMA else "DRAFTER"
            words = FLAGS[program](replace(found, drafter=own) if is_other else found, word)
            lines.append(f"{title}: {words[0] if program == TRANSFORMERS else shlex.join(words)}")
            if SCHEDULE_FILE in words:  # one draft length from each number of concurrent requests on
                content = {str(first): {"candidate_steps": [drafts]} for first, _, drafts in found.schedule}
                lines.append(f"{SCHEDULE_FILE}: {json.dumps(content)}")
        lines += [NO_SETTING.format(title, missing)] if missing else []
    return [*lines, OWN_HEAD] if found.kind == HEAD else lines


def _vllm(found: Speculation, word: str) -> list[str]:
    config: dict[str, Any] = {"method": word, "num_speculative_tokens": found.drafts}
    if found.drafter:
        config["model"] = found.drafter
    if found.kind in PARALLEL:
        config["parallel_drafting"] = True
    if word.startswith("ngram"):
        config |= dict(zip(("prompt_lookup_min", "prompt_lookup_max"), found.matches, strict=True))
    if found.translates:
        config["use_heterogeneous_vocab"] = True
    if found.samples and found.has_rule(VLLM, word):
        config["draft_sample_method"] = "probabilistic"
        config |= {"rejection_sample_method": "block"} if found.rule == "block" else {}
    if quantize := QUANTIZED[VLLM].get(found.drafter_quantize):
        config["quantization"] = quantize
    if found.schedule:
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in found.schedule]
    target = QUANTIZED[VLLM].get(found.quantize)
    return [*(["--quantization", target] if target else []), "--speculative-config", json.dumps(config)]


def _sglang(found: Speculation, word: str) -> list[str]:
    words = ["--speculative-algorithm", word]
    words += ["--speculative-draft-model-path", found.drafter] if found.drafter else []
    verified = ["--speculative-num-draft-tokens", str(found.drafts + 1)]  # the token before the drafts is one of them
    if word == "DSPARK":
        words += ["--speculative-dspark-block-size", str(found.drafts)]
    elif word == "NGRAM":
        words += [*verified, "--speculative-ngram-max-bfs-breadth", "1"]  # a chain instead of a tree
    elif word == "DFLASH":
        words += verified
    else:
        words += ["--speculative-num-steps", str(found.drafts), "--speculative-eagle-topk", "1", *verified]
    if found.samples and found.has_rule(SGLANG, word):
        words.append(f"--speculative-use-{'rejection-sampling' if found.rule == 'rejection' else 'block-verification'}")
    if target := QUANTIZED[SGLANG].get(found.quantize):
        draft = QUANTIZED[SGLANG].get(found.drafter_quantize, "unquant")  # otherwise it would be the target's
        words += ["--quantization", target]
        words += ["--speculative-draft-model-quantization", draft] if found.drafter else []
    if found.schedule and word in CHAINS:
        words += ["--speculative-adaptive", "--speculative-adaptive-config", SCHEDULE_FILE]
    return words


def _llama(found: Speculation, word: str) -> list[str]:
    drafts = str(found.drafts)
    if word.startswith("ngram-"):
        sizes = [f"--spec-{word}-size-n", str(found.matches[0]), f"--spec-{word}-size-m", drafts]
        return ["--spec-type", word, *sizes]
    words = ["--spec-type", word, "--spec-draft-n-max", drafts]
    words += ["--spec-draft-model", found.drafter] if found.drafter else []
    sampled = found.samples and found.has_rule(LLAMA, word)
    return [*words, *(["--spec-draft-sampling", "probabilistic"] if sampled else [])]


def _transformers(found: Speculation, word: str) -> list[str]:
    """One line of Python."""
    target = QUANTIZED[TRANSFORMERS].get(found.quantize)
    lines = [f"model = AutoModelForCausalLM.from_pretrained(TARGET, quantization_config={target})"] if target else []
    # The heuristic schedule and the confidence threshold would change the number of drafts.
    fixed = (
        f"generation_config.update(num_assistant_tokens={found.drafts}, "
        'num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)'
    )
    options = {
        "mtp": "use_mtp=True",
        "lookup": f"prompt_lookup_num_tokens={found.drafts}, max_matching_ngram_size={found.matches[1]}",
        "layers": f"assistant_early_exit={found.kind.removeprefix(LAYERS)}",
        "model": "assistant_model=assistant"
        + ", tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer" * found.translates,
    }[word]
    if word == "layers":
        lines.append(f"model.{fixed}")
    if word == "model":
        quantize = QUANTIZED[TRANSFORMERS].get(found.drafter_quantize)
        weights = f", quantization_config={quantize}" if quantize else ""
        load = f"assistant = AutoModelForCausalLM.from_pretrained({json.dumps(found.drafter)}{weights})"
        lines += [load, f"assistant.{fixed}"]
    return ["; ".join([*lines, f"model.generate(**inputs, {options})"])]


FLAGS = {VLLM: _vllm, SGLANG: _sglang, LLAMA: _llama, TRANSFORMERS: _transformers}
# The drafter kind for a program's word.
KINDS = {word.lower(): kind for words in WORDS.values() for kind, word in reversed([*words.items()])}
