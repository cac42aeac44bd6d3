"""The card of a drafter: what it was made of, how, for how long, and what came of it."""

from __future__ import annotations

import json
import platform
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from sampling.distill.chat_script import LONGEST_QUESTION, QUESTION_WARMTH
from sampling.distill.generate import WARMTHS
from sampling.distill.options import Order
from utils.errors import UserError

HEAD = "one decoder layer that reads the target's hidden states and drafts with its output rows (EAGLE, arXiv 2401.15077, 2503.01840)"
MODEL = "a small causal language model with the target's tokenizer"


def write_card(
    order: Order, progress: Any, rates: dict[str, list[float | None]], *, written: int, steps: int, target: Any
) -> None:
    """README.md next to the weights. Raises UserError where it cannot be written."""
    plan = order.plan
    # Folders are this machine's own: a reader has others.
    settings = asdict(plan) | ({"target": "TARGET"} if Path(plan.target).expanduser().exists() else {})
    settings |= {name: name.upper() for name in ("prompts", "start") if settings[name]}
    flags = [
        f"--{name} {shlex.quote(str(value))}"
        for name, value in settings.items()
        if value and name not in ("rate_rest", "device")
    ]
    lines = [
        f"# Drafter for {target.name_or_path}",
        "",
        f"Kind: {plan.kind}, {HEAD if plan.kind == 'head' else MODEL}. It only proposes: what it is worth is speed, never text.",
        "",
        "| draft's place in its round | " + " | ".join(str(place + 1) for place in range(len(rates["greedy"]))) + " |",
        "|---" * (len(rates["greedy"]) + 1) + "|",
        "| greedy text: accepted, given that the earlier ones were | "
        + " | ".join(map(_shown, rates["greedy"]))
        + " |",
        "| text drawn at T = 1: chance to be accepted | " + " | ".join(map(_shown, rates["drawn"])) + " |",
        "",
        f"Measured on {plan.rows} conversations that were held out, written by the target from a seed of their own. Again:",
        "",
        f"    python -m sampling.distill --measure --out FOLDER {' '.join(flags)}",
        "",
        "## How it was made",
        "",
        f"- Text: {written:,} tokens that the target chose, in its chat template, answers at temperatures {', '.join(map(str, WARMTHS))} "
        f"by turns, questions {_questions(plan.prompts)}.",
        *(["- Begun from a drafter made before (`--start`), not from nothing."] if plan.start else []),
        f"- Training: {steps:,} steps of {plan.batch} conversations of {plan.length} tokens, unrolled over {plan.steps} drafts, "
        f"towards the target's laws; Muon at {plan.rate}, AdamW at {plan.rate_rest} for vectors and embeddings, half a cosine.",
        f"- Time: {progress.writing / 3600:.2f} h of writing, {progress.training / 3600:.2f} h of training, {_machine(target)}.",
        "",
        "| tokens learnt from | seconds | loss | greedy, place 1 | at T = 1, place 1 |",
        "|---|---|---|---|---|",
        *(
            f"| {look['tokens']:,} | {look['seconds']:.0f} | {look['loss']:.2f} "
            f"| {_shown(look['greedy'][0])} | {_shown(look['drawn'][0])} |"
            for look in progress.curve
        ),
        "",
        "Settings: `" + json.dumps(settings) + "`",
        "",
    ]
    try:
        (order.out / "README.md").write_text("\n".join(lines), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{order.out} cannot be written: {error.strerror or error}.") from error


def _shown(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3f}"


def _questions(prompts: str | None) -> str:
    if prompts:
        return "out of a file"
    return (
        f"its own at temperature {QUESTION_WARMTH}, at most {LONGEST_QUESTION} tokens, with a given beginning for most"
    )


def _machine(target: Any) -> str:
    where = (
        torch.cuda.get_device_name(target.device)
        if target.device.type == "cuda"
        else f"{torch.get_num_threads()} threads of a CPU"
    )
    return (
        f"{where}, {str(target.dtype).removeprefix('torch.')}, torch {torch.__version__}, transformers {transformers.__version__}, "
        + (f"Python {platform.python_version()}")
    )
