"""The rotary positions of GGUF files: models are those from which the files were written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny import tiny_llama, tiny_tokenizer
from tiny_gguf import add_tokens, write_gguf

from utils.errors import UserError
from utils.models.checkpoints import load_model
from utils.models.gguf_header import LLAMA3, read_config, read_tokenizer
from utils.models.gguf_model import load_in_blocks
from utils.models.memory import Placement
from utils.models.sources import Source, locate

LONGROPE = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 4.0, 9.0, 16.0]}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn, other bounds": {"factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 9.0, "beta_slow": 3.0},
    "llama3": LLAMA3 | {"factor": 32.0},
    "longrope": LONGROPE | {"original_max_position_embeddings": 16, "attention_factor": 1.25},
}


@pytest.mark.parametrize("is_in_blocks", [False, True])
@pytest.mark.parametrize("kind", SCALINGS)
def test_rotary_positions_are_those_of_the_original(kind: str, is_in_blocks: bool, tmp_path: Path) -> None:
    keys = SCALINGS[kind] | {"rope_type": kind.partition(",")[0], "rope_theta": 500_000.0}
    model = tiny_llama(vocab_size=300, num_key_value_heads=2, max_position_embeddings=64, rope_parameters=keys)
    path = write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer(), parts=())
    source, where = locate(str(path), print), Placement("cpu", torch.float32, lambda line: None)
    found = load_in_blocks(source, where) if is_in_blocks else load_model(source, "none", where)
    assert not isinstance(found, str)
    loaded = found[0] if isinstance(found, tuple) else found
    for length in (8, 40):  # within and beyond the original context
        like, positions = torch.ones(1), torch.arange(length)[None]
        for own, original in zip(*(part.model.rotary_emb(like, positions) for part in (loaded, model)), strict=True):
            assert torch.equal(own, original)


def _stored(writer: gguf.GGUFWriter, kind: gguf.RopeScalingType) -> None:
    writer.add_rope_scaling_type(kind)
    writer.add_rope_scaling_factor(4.0)


UNREADABLE: dict[str, Callable[[gguf.GGUFWriter], object]] = {
    "quotients of another formula": lambda writer: writer.add_tensor(
        "rope_freqs.weight", np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)
    ),
    "quotients of other heads": lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(3, dtype=np.float32)),
    "a type without its factors": lambda writer: _stored(writer, gguf.RopeScalingType.LONGROPE),
    "another scaling of attention": lambda writer: (
        _stored(writer, gguf.RopeScalingType.YARN),
        writer.add_rope_scaling_yarn_log_mul(0.1),
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiny_gguf.add_rotary", lambda writer, config: UNREADABLE[name](writer))
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(vocab_size=300), tiny_tokenizer(), parts=())
    with pytest.raises(UserError, match="rotary"):
        load_model(locate(str(path), print), "none", Placement("cpu", torch.float32, lambda line: None))


def _header(path: Path, architecture: str, *, layers: int = 2, factor: float = 1.0, parts: int = 1) -> Source:
    """The source of a file without weights, whose frequencies begin at 70,000."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_embedding_length(96)
    writer.add_head_count(4)
    writer.add_key_length(32)
    writer.add_rope_freq_base(70_000.0)
    writer.add_rope_dimension_count(16)
    if factor > 1.0:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)
    writer.add_vocab_size(300)
    writer.add_uint16("split.count", parts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Source(str(path.parent), path.name, path.name)


def test_parts_of_a_file_are_refused(tmp_path: Path) -> None:
    source = _header(tmp_path / "model-00001-of-00003.gguf", "llama", parts=3)
    with pytest.raises(UserError, match="3 files.*--merge"):
        read_config(source)


def test_local_layers_are_not_scaled(tmp_path: Path) -> None:
    keys = read_config(_header(tmp_path / "gemma.gguf", "gemma3", factor=8.0)).rope_parameters
    assert keys["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 70_000.0}
    assert keys["sliding_attention"] == {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_queries_by_the_size_of_its_states(
    architecture: str, layers: int, tmp_path: Path
) -> None:
    for count, scalar in ((layers, 96 / 4), (layers - 1, 256)):
        config = read_config(_header(tmp_path / f"{count}.gguf", architecture, layers=count))
        assert config.query_pre_attn_scalar == scalar


@pytest.mark.parametrize("kind", ["gpt-2", "smollm"])
def test_digits_are_tokens_of_their_own_where_the_type_says_so(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add_tokens(writer, tiny_tokenizer())
    writer.add_tokenizer_pre(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer: Any = read_tokenizer(Source(str(path.parent), path.name, path.name))
    pieces = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("ab12")]
    assert pieces == (["ab", "1", "2"] if kind == "smollm" else ["ab", "12"])


@pytest.mark.parametrize("says", [None, False, True])
@pytest.mark.parametrize("kind", ["gpt-2", "llama-bpe"])
def test_words_are_known_as_a_whole_where_the_type_says_so(kind: str, says: bool | None, tmp_path: Path) -> None:
    """In files that were converted, too."""

    def add_type(writer: gguf.GGUFWriter, config: Any) -> None:
        writer.add_tokenizer_pre(kind)
        if says is not None:
            writer.add_add_bos_token(says)

    words = tiny_tokenizer()
    *tokens, _, last = words.convert_ids_to_tokens(range(len(words)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiny_gguf.add_rotary", add_type)
        patch.setattr(words, "convert_ids_to_tokens", lambda ids: [*tokens, "abc", last])
        path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(vocab_size=300), words, parts=())
    source, where = locate(str(path), print), Placement("cpu", torch.float32, lambda line: None)
    loaded = load_in_blocks(source, where)
    assert not isinstance(loaded, str)
    is_whole = kind == "llama-bpe"
    for tokenizer in (read_tokenizer(source), loaded[1]):
        assert tokenizer.tokenize("abc") == (["abc"] if is_whole else ["ab", "c"])
        begins = tokenizer("a").input_ids[0] == tokenizer.bos_token_id
        assert begins is (is_whole if says is None else says)


def test_keys_that_transformers_does_not_read(tmp_path: Path) -> None:
    assert read_config(_header(tmp_path / "coder.gguf", "starcoder2")).rope_parameters["rope_theta"] == 70_000.0
    keys = read_config(_header(tmp_path / "phi.gguf", "phi3")).rope_parameters
    assert keys["partial_rotary_factor"] == 16 / (96 / 4)
