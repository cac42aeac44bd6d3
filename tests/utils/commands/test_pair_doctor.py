"""/pair doctor: a row for each reading, one of which is used, and a verdict."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from drafter_checkpoints import VOCABULARY, eagle3_tensors, speculators_config, write_checkpoint
from fakes import TinyPair, checked, open_session, screen, table_pair
from servers.decoding_server import noisy_pair
from shelf import load
from tiny import save_folder, tiny_llama, tiny_tokenizer

from utils.commands import pairs
from utils.pairs.doctor import other_readings
from utils.prompts.prompt_files import Prompt


def test_readings_are_listed_and_a_random_drafter_is_not_said_to_fit(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save_folder(tmp_path / "target", tiny_llama(num_hidden_layers=6), tiny_tokenizer(VOCABULARY))
    drafter = write_checkpoint(tmp_path / "drafter", speculators_config({}), eagle3_tensors({}))
    pair = load(target, drafter)
    varied = torch.randint(VOCABULARY, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    monkeypatch.setattr(
        "utils.pairs.doctor.own_text", lambda target, prompt, *rest, **others: [*[1] * len(prompt), *varied]
    )
    view, file = screen(), tmp_path / "records.jsonl"
    before = pair.drafter.conventions
    open_session(view, pair, records=file).handle("/pair doctor")  # the tokenizer has more ids than the target
    shown = view.take()[0]
    assert shown.count("layer ids read as") >= 2 and "as it is read now" in shown and "different target" in shown
    assert other_readings(pair.drafter) and pair.drafter.conventions == before


WORDS = "apple bread cloud dream eagle flame grape house island jungle kettle lemon"


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        (noisy_pair, "Sound: drafts are accepted as expected at every position"),
        (partial(table_pair, max_position_embeddings=512, reads_all=True), "The first draft is accepted at 0.0"),
    ],
)
def test_causes_are_found_for_any_drafter(
    pair: Callable[[], TinyPair], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [Prompt(f"{word} has {len(word)} letters") for word in WORDS.split()]
    monkeypatch.setattr(pairs, "CAUSE_TOKENS", 10)
    monkeypatch.setattr(pairs, "LONG_TOKENS", 48)
    monkeypatch.setattr(pairs, "plan_prompts", lambda *arguments: SimpleNamespace(measured=prompts))
    view, file = screen(), tmp_path / "records.jsonl"
    record = checked(open_session(view, pair(), records=file), file, "/pair doctor")
    shown = " ".join(view.take()[0].split())
    assert expected in shown and "at least 0.15 for the first draft" in shown and "at most 1%" in shown
    assert record["record"] == "drafter doctor"
    assert {row["texts"] for row in record["findings"]} >= {"greedy", "sampled", "long context", "other template"}


def test_without_a_drafter_there_is_nothing_to_examine() -> None:
    view = screen()
    open_session(view, table_pair(drafter=False)).handle("/pair doctor")
    assert "none is loaded" in view.take()[1]
