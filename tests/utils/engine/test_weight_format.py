"""Which weights int4 keeps in 8 bits."""

import pytest
import torch

from utils.engine.weight_blocks import BlockWeight, round_int4, round_int8
from utils.engine.weight_format import EngineWeights


@pytest.mark.parametrize(("name", "bits"), [("mlp.down_proj", 8), ("mlp.up_proj", 4), ("self_attn.o_proj", 4)])
def test_int4_keeps_the_last_weight_of_an_mlp_in_8_bits(name: str, bits: int) -> None:
    torch.manual_seed(0)
    block = EngineWeights("int4").form(f"model.layers.0.{name}", torch.randn(16, 64), is_head=False)
    assert isinstance(block, BlockWeight) and block.bits == bits


def test_weights_that_were_rounded_before_stay_the_same() -> None:
    """Those of 4-bit files too: 8 bits would change them."""
    torch.manual_seed(1)
    weight = torch.randn(16, 64)
    for rounded in (round_int4(weight), round_int8(weight)):
        block = EngineWeights("int4").form("model.layers.0.mlp.down_proj", rounded.dense(), is_head=False)
        assert (
            isinstance(block, BlockWeight)
            and torch.equal(block.dense(), rounded.dense())
            and block.bits == rounded.bits
        )
