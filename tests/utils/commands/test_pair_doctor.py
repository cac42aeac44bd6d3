"""/pair doctor: a row for each reading, one of which is used, and a verdict."""

import pytest
import torch
from drafter_checkpoints import VOCABULARY, eagle3_tensors, speculators_config, write_checkpoint
from fakes import checked, open_session, screen
from shelf import load
from tiny import save_folder, tiny_llama, tiny_tokenizer

from utils.commands import pairs
from utils.pairs.doctor import other_readings


def test_readings_are_listed_and_a_random_drafter_is_not_said_to_fit(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save_folder(tmp_path / "target", tiny_llama(num_hidden_layers=6), tiny_tokenizer(VOCABULARY))
    drafter = write_checkpoint(tmp_path / "drafter", speculators_config({}), eagle3_tensors({}))
    pair = load(target, drafter)
    varied = torch.randint(VOCABULARY, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    monkeypatch.setattr(pairs, "own_text", lambda target, prompt, *rest: [*[1] * len(prompt), *varied])
    view, file = screen(), tmp_path / "records.jsonl"
    before = pair.drafter.conventions
    checked(open_session(view, pair, records=file), file, "/pair doctor")
    shown = view.take()[0]
    assert shown.count("layer ids read as") >= 2 and "as it is read now" in shown and "different target" in shown
    assert other_readings(pair.drafter) and pair.drafter.conventions == before


def test_drafters_without_hidden_states_are_not_examined() -> None:
    view = screen()
    open_session(view).handle("/pair doctor")
    assert "is not one" in view.take()[1]
