"""How the drafter is named to the user: a published one by its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_checkpoints import HIDDEN, eagle3_tensors, speculators_config, write_checkpoint
from fakes import Screen, open_session, records_of
from mtp_checkpoints import qwen_layers, tiny_qwen3, write_target
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_tokenizer

from utils.commands.verdicts.selection import kind_name
from utils.comparison.strategies import STRATEGIES
from utils.config.settings import Settings
from utils.repl.repl_session import Verdict
from utils.repl.status import first_screen, model_facts


def eagle3_pair(root: Path) -> Any:
    save_folder(root / "target", tiny_llama(vocab_size=300, num_hidden_layers=6), tiny_tokenizer())
    tensors = eagle3_tensors({}, every=1)
    tensors["lm_head.weight"] = torch.randn(300, HIDDEN)
    return root / "target", write_checkpoint(root / "drafter", speculators_config({}), tensors)


def mtp_pair(root: Path) -> Any:
    target = tiny_qwen3(vocab_size=300)
    return write_target(root / "target", target, qwen_layers(target), tiny_tokenizer()), "mtp"


@pytest.mark.parametrize(("write", "name"), [(eagle3_pair, "EAGLE-3"), (mtp_pair, "MTP")])
def test_a_published_drafter_is_named_by_its_format(tmp_path: Path, view: Screen, write: Any, name: str) -> None:
    pair, file = load(*write(tmp_path)), tmp_path / "runs.jsonl"
    assert pair.drafter_kind == name
    assert any(f"target + {name} · CPU" in line for line in first_screen(pair, Settings(), 1.0, 80))
    facts = dict(model_facts(pair, Settings()))
    assert facts["drafter model"].count(f"({name})") == 1
    session = open_session(view, pair, records=file)
    for line in ("/length 6", "/ngram off", "/drafter_kind loaded suffix"):
        assert session.handle(line) is Verdict.DONE, view.take()
    view.take()
    assert session.handle("Hello there") is Verdict.DONE
    assert [(row["strategy"], row["drafter_kind"]) for row in records_of(file) if row["drafter_kind"]] == [
        (f"speculative {name}", name),
        ("speculative suffix", "suffix"),
    ]
    assert name in dict(session.settings.costs.draft) and "head" not in "".join(map(str, view.take()))
    strategy = next(row for row in STRATEGIES if row.name == "speculative").variants(("loaded",), pair)[0]
    assert kind_name(strategy, pair) == f"the {name} drafter"


def test_options_of_other_drafters_are_refused_with_the_format(tmp_path: Path) -> None:
    assert "kind EAGLE-3" in refusal(*eagle3_pair(tmp_path), drafter_quantize="int8")
