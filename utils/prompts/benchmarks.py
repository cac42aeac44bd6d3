"""Formats of published benchmarks of speculative decoding: which one a line of a prompts file has, and its category.

Spec-Bench (Xia et al. 2024, hemingkx/Spec-Bench, data/spec_bench/question.jsonl) has question_id (a whole number),
category and turns. Its tables count the eight categories of MT-bench as one (evaluation/speed.py). SPEED-Bench
(arXiv 2604.09557, nvidia/SPEED-Bench) has question_id (a text), category, sub_category, turns, source, src_id,
difficulty and multiturn. The categories of its Throughput split are bands of entropy.
"""

import re
from collections.abc import Mapping
from pathlib import Path

SPEC_BENCH, SPEED_BENCH = "Spec-Bench", "SPEED-Bench"
MT_BENCH = "mt_bench"
MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
SPEED_BENCH_FIELDS = ("sub_category", "multiturn", "src_id", "difficulty")
ENTROPY_BANDS = frozenset(("low_entropy", "mixed", "high_entropy"))
# SPEED-Bench is published without the texts of datasets that may not be copied.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


def benchmark_of(entry: Mapping[str, object]) -> str:
    """SPEC_BENCH, SPEED_BENCH, or "" for a line that has the format of neither."""
    if "turns" not in entry or "category" not in entry or "question_id" not in entry:
        return ""
    if isinstance(entry["question_id"], str) or any(field in entry for field in SPEED_BENCH_FIELDS):
        return SPEED_BENCH
    return SPEC_BENCH


def task_of(category: str, benchmark: str, path: Path) -> str:
    """The row of the benchmark's tables that a category belongs to.

    path: of the file. The Throughput split has one file for each input length, and only its name or that of its folder
    (throughput_8k) says which.
    """
    if benchmark == SPEC_BENCH and category in MT_BENCH_CATEGORIES:
        return MT_BENCH
    if benchmark == SPEED_BENCH and category in ENTROPY_BANDS:
        length = re.search(r"throughput_(\d+k)", "/".join(path.absolute().parts[-2:]))
        return f"{length[1]} {category}" if length else category
    return category
