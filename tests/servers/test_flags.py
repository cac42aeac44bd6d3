"""Settings of other programs: every drafter kind has flags or a sentence, and they hold what was found."""

import json
import shlex
from typing import Any

import pytest
from transformers import GenerationConfig

from utils.bounds import QUANTIZATIONS, RULES
from utils.drafter_formats.formats import FORMATS
from utils.errors import UserError
from utils.pairs.request import DRAFTERS, LOADED, PARD
from utils.servers.processes.flags import HEADING, TITLES, Speculation, draft_flags, settings_elsewhere

KINDS = sorted({*DRAFTERS, PARD, "ngram", "layers:4", *(row.name for row in FORMATS)} - {LOADED, "layers:K"})
WITHOUT_MODEL = {"lookup", "suffix", "ngram", "layers:4"}


def rows(found: Speculation) -> dict[str, str]:
    """The line of each program that supports it."""
    heading, *lines = settings_elsewhere(found)
    assert heading == HEADING
    return dict(line.split(": ", 1) for line in lines if ": " in line)


def config(found: Speculation) -> dict[str, Any]:
    """The value of vLLM's --speculative-config."""
    words = shlex.split(rows(found)["vLLM"])
    return dict(json.loads(words[words.index("--speculative-config") + 1]))


def words(found: Speculation, program: str) -> list[str]:
    return shlex.split(rows(found)[program])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_settings_or_a_sentence_for_each_program(kind: str) -> None:
    drafter = "" if kind in WITHOUT_MODEL else "some/'drafter\""
    found = Speculation(kind, 5, drafter)
    lines, flags = settings_elsewhere(found), rows(found)
    for title in TITLES.values():
        assert (title in flags) != any(line.startswith(f"{title} has no setting for drafts of this") for line in lines)
    if "vLLM" in flags:
        assert config(found)["num_speculative_tokens"] == 5 and config(found).get("model", "") == drafter
    if "transformers" in flags:
        compile(flags["transformers"], "settings", "exec")
    assert kind in ("head", "ngram", "chain") or flags, "no other program has this kind: list it here"
    for program in TITLES:
        if TITLES[program] in flags:
            assert draft_flags(program, found)
        else:
            with pytest.raises(UserError, match="has no setting for"):
                draft_flags(program, found)


def test_what_vllm_must_be_told() -> None:
    assert config(Speculation(PARD, 8, "a/pard"))["parallel_drafting"] is True
    assert config(Speculation("P-EAGLE", 8, "a"))["parallel_drafting"] is True
    assert "parallel_drafting" not in config(Speculation("EAGLE-3", 8, "a"))
    lookup = config(Speculation("lookup", 4, matches=(3, 6)))
    assert (lookup["prompt_lookup_min"], lookup["prompt_lookup_max"]) == (3, 6)
    assert config(Speculation("model", 4, "a", translates=True))["use_heterogeneous_vocab"] is True
    assert "model" not in config(Speculation("MTP", 1))
    scheduled = config(Speculation("EAGLE-3", 5, "a", schedule=((1, 3, 5), (4, 16, 0))))
    assert scheduled["num_speculative_tokens_per_batch_size"] == [[1, 3, 5], [4, 16, 0]]


def test_llama_cpp_alone_takes_a_gguf_file() -> None:
    for drafter, shown, other in (("org/small", "DRAFTER.gguf", "org/small"), ("small.gguf", "small.gguf", "DRAFTER")):
        found = Speculation("model", 4, drafter)
        line = words(found, "llama.cpp")
        assert line[line.index("--spec-draft-model") + 1] == shown and config(found)["model"] == other


def test_sglang_counts_the_token_before_the_drafts() -> None:
    line = words(Speculation("EAGLE-3", 4, "a"), "SGLang")
    assert line[line.index("--speculative-num-steps") + 1] == "4"
    assert line[line.index("--speculative-num-draft-tokens") + 1] == "5"
    assert "--speculative-dspark-block-size 7" in " ".join(words(Speculation("DSpark", 7, "a"), "SGLang"))


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_set_where_the_program_has_it_and_otherwise_named(rule: str) -> None:
    found = Speculation("EAGLE-3", 4, "a", rule=rule)
    lacking = {line.split(" has no")[0] for line in settings_elsewhere(found) if f"the rule {rule}" in line}
    assert lacking == {"rejection": set(), "block": {"llama.cpp"}, "coupled": {"vLLM", "SGLang", "llama.cpp"}}[rule]
    assert ("draft_sample_method" in config(found)) == (rule != "coupled")
    assert (config(found).get("rejection_sample_method") == "block") == (rule == "block")
    assert not any("the rule" in line for line in settings_elsewhere(Speculation("lookup", 4, rule=rule)))


@pytest.mark.parametrize("quantize", [*QUANTIZATIONS, "gptq"])
def test_quantized_weights_are_set_or_named(quantize: str) -> None:
    found = Speculation("model", 4, "a", quantize=quantize, drafter_quantize=quantize)
    lines, flags = settings_elsewhere(found), rows(found)
    is_own = quantize not in ("none", "gptq")
    assert ("quantization_config=" in flags["transformers"]) == is_own
    for title in ("vLLM", "SGLang", "llama.cpp"):
        named = f"{title} has no setting for {quantize} weights." in lines
        assert (named or "quantization" in flags[title]) == is_own and not (named and "quantization" in flags[title])


def test_a_drafter_that_is_not_quantized_stays_so_under_a_quantized_target() -> None:
    line = words(Speculation("model", 4, "a", quantize="nf4"), "SGLang")
    assert line[line.index("--speculative-draft-model-quantization") + 1] == "unquant"


def test_a_schedule_is_given_where_the_program_has_one() -> None:
    lines = settings_elsewhere(Speculation("EAGLE-3", 5, "a", schedule=((1, 3, 5), (4, 16, 0))))
    (file,) = (line for line in lines if line.startswith("draft_lengths.json: "))
    assert json.loads(file.partition(": ")[2]) == {"1": {"candidate_steps": [5]}, "4": {"candidate_steps": [0]}}
    assert any(line.startswith("llama.cpp has no setting for draft lengths that depend") for line in lines)
    lines = settings_elsewhere(Speculation("model", 5, "a", schedule=((1, 3, 5), (4, 16, 0))))
    assert any(line.startswith("SGLang has no setting for draft lengths that depend") for line in lines)


def test_what_only_one_program_knows_has_no_settings() -> None:
    assert settings_elsewhere(Speculation("", 4, "a")) == []


def test_the_installed_transformers_knows_these_names() -> None:
    """Only this one of the four programs is always installed."""
    config = GenerationConfig()
    for name in ("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "use_mtp"):
        assert hasattr(config, name)
    config.update(num_assistant_tokens=3, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)
    assert config.num_assistant_tokens == 3
