"""Encoder-decoder pairs from the folder to the screen: what is loaded, what is refused, and how sessions use them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Screen, checked, open_session, records_of, tiny_pair
from shelf import load, refusal
from tiny import save_folder, tiny_bart, tiny_marian, tiny_t5, tiny_tokenizer

from ngram_assisted import NGramStorage, ngram_assisted_speculative_generate
from sampling import autoregressive_generate, beam_search_generate, speculative_generate
from utils.comparison.warm_up import draft_seconds
from utils.decode.generation_rules import GenerationRules
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.repl.loaded_pair import NO_TEMPLATE
from utils.repl.repl_session import Verdict

KINDS = "/drafter_kind loaded lookup suffix chain"


def folder(root: Path, name: str, model: Any, **settings: Any) -> Path:
    """A checkpoint with the generation settings of the model and these."""
    for field, value in settings.items():
        setattr(model.generation_config, field, value)
    return save_folder(root / name, model, tiny_tokenizer(chat=False))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("encoders")
    wants = {
        "num_beams": 4,
        "forced_bos_token_id": 7,
        "min_length": 5,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[3], [4, 5]],
    }
    tied = {"vocab_size": 300, "tie_word_embeddings": True}
    return {
        "t5": folder(root, "t5", tiny_t5(vocab_size=300)),
        "bart": folder(root, "bart", tiny_bart(vocab_size=300, max_position_embeddings=24), **wants),
        "marian": folder(
            root, "marian", tiny_marian(pad_token_id=299, decoder_start_token_id=299, **tied), bad_words_ids=[[299]]
        ),
    }


@pytest.mark.parametrize("name", ["bart", *(pytest.param(name, marks=pytest.mark.full) for name in ("t5", "marian"))])
def test_a_pair_from_folders_runs_every_strategy_but_chat(
    name: str, folders: dict, view: Screen, tmp_path: Path
) -> None:
    file, pair = tmp_path / "runs.jsonl", load(folders[name], folders[name])
    session = open_session(view, pair, records=file, draft_seconds=draft_seconds)
    session._loaded.warm_up()
    assert NO_TEMPLATE in view.take()[1] and any(not note.startswith("pair: ") for note in pair.notes) == (
        name == "bart"
    )
    checked(
        session,
        file,
        "/beams 2",
        "/drafter on",
        "/length 12",
        KINDS,
        "/gamma auto",
        "Hello, hello",
        "/gamma 3",
        "/cache off",
        "Hello, hello",
    )
    rows = {(record["strategy"], record["settings"]["cache"]): record for record in records_of(file)}
    assert len(rows) == 16 and rows["speculative model", False]["acceptance_rate"] == 1.0
    assert len({tuple(row["token_ids"]) for (strategy, _), row in rows.items() if strategy != "beam"}) == 1
    assert session.handle("/drafter_kind layers:1") is Verdict.FAILED
    assert "encoder-decoder" in view.take()[1]
    assert session.handle("/chat on") is Verdict.DONE and session.settings.uses_chat is False


def test_the_engine_stays_plain_and_reports_why() -> None:
    engine = tiny_pair(kind="t5", chat=False).engine
    assert engine.use("auto", 1).kind == "plain" and "it is an encoder-decoder model" in engine.state.sentence()
    assert engine.step_seconds > 0 and len(engine.costs) == 16
    with pytest.raises(UserError, match="encoder-decoder"):
        engine.use("invariant", 1)


def test_learned_positions_end_every_run_with_the_context(folders: dict, view: Screen, tmp_path: Path) -> None:
    """23 new tokens after the decoder's start token; a drafter with fewer positions drafts nothing beyond them."""
    file, pair = tmp_path / "runs.jsonl", replace(load(folders["bart"], folders["t5"]), end_ids=frozenset())
    pair.drafter.config.max_position_embeddings = 18
    session = open_session(view, pair, records=file)
    checked(session, file, "/length 24", "/gamma 4", "/beams 2", "/drafter_kind loaded chain", "Hello, hello")
    assert {(len(record["token_ids"]), record["finish"]) for record in records_of(file)} == {(23, "length")}
    assert session.handle("/length 25") is Verdict.FAILED
    assert session.handle("x" * 24) is Verdict.DONE
    assert "18" in view.take()[1]
    assert session.handle("x" * 25) is Verdict.FAILED
    assert "24" in view.take()[1]


def test_unsupported_generation_settings_are_noted(folders: dict) -> None:
    (note,) = (note for note in load(folders["bart"], folders["bart"]).notes if not note.startswith("pair: "))
    assert all(part in note for part in ("bart", "no_repeat_ngram_size 3", "min_length 5", "bad_words_ids"))
    pair = load(folders["bart"], folders["bart"])
    made = autoregressive_generate([5, 6, 7], pair.target, 9, eos_tokens_id=None)
    assert made[0] == 7 and 3 not in made
    rules, logits = GenerationRules.of(pair.target), torch.zeros(1, 2, 300)
    assert (rules.never, rules.forced) == ((3,), 7)
    assert rules(logits, 0)[0, 0].argmax() == 7 and not logits.any()
    assert beam_search_generate([5, 6, 7], pair.target, 9, eos_tokens_id=None)[0] == 7


def test_two_kinds_of_models_are_refused_both_ways(folders: dict, shelf: Path) -> None:
    sentence = refusal(folders["t5"], shelf / "drafter")
    assert "encoder-decoder" in sentence and "layers" not in sentence
    assert "layers:K" in refusal(shelf / "target", folders["t5"])
    with pytest.raises(UserError, match="encoder-decoder"):
        speculative_generate([1], load(shelf / "drafter").target, load(folders["t5"]).target)


def test_the_start_token_of_the_decoder() -> None:
    model = tiny_t5()
    model.generation_config.decoder_start_token_id = 5
    assert ModelSession(model).begin([1, 2]) == [5]
    model.generation_config.decoder_start_token_id = model.config.decoder_start_token_id = None
    model.generation_config.bos_token_id = 6
    assert ModelSession(model).begin([1, 2]) == [6]
    model.generation_config.bos_token_id = model.config.bos_token_id = None
    assert ModelSession(model, start_token=4).begin([1, 2]) == [4]


def test_a_storage_contains_the_encoders_text_and_the_answer() -> None:
    model, storage = tiny_t5(), NGramStorage(3, 64)
    made, _ = ngram_assisted_speculative_generate(
        [30, 31, 32], storage, model, max_gen_len=6, filler_top_k=1, eos_tokens_id=None
    )
    assert storage.next_token([30, 31]) == 32
    assert storage.next_token(made[:2]) == made[2]
