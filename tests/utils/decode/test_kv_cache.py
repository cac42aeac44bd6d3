"""The cache that grows in place against that of transformers, after random sequences of operations."""

import copy
from random import Random

import pytest
import torch
from tiny import tiny_llama, tiny_sliding
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from utils.decode.kv_cache import GrowingLayer, new_cache


def fill(layer: GrowingLayer, *new: torch.Tensor) -> None:
    """Append new states as machine code does, into the buffers."""
    length, shape = layer.get_seq_length(), new[0].shape
    for buffer, part in zip(layer.extended((shape[0], shape[1], shape[2], shape[3])), new, strict=True):
        buffer[:, :, length : length + shape[2]] = part


@pytest.mark.parametrize("seed", range(12))
def test_contents_equal_those_of_the_concatenating_layer(seed: int) -> None:
    source = Random(seed)
    torch.manual_seed(seed)
    ours, theirs = GrowingLayer(), DynamicLayer()
    for _ in range(40):
        new = [torch.randn(2, 3, source.choice((1, 1, 4, 200)), 8) for _ in range(2)]
        new[1] = torch.randn(new[0].shape)
        if source.random() < 0.5:
            ours.update(*new)
        else:
            fill(ours, *new)
        theirs.update(*new)
        if source.random() < 0.5:  # otherwise what follows finds positions that no view has yet
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        act = source.choice(("crop", "rows", "copy", "nothing", "reset"))
        if act == "crop":
            excess = source.randint(0, min(5, ours.get_seq_length()))
            ours.crop(-excess)
            theirs.crop(-excess)
        elif act == "rows":
            rows = torch.tensor([source.randrange(2), source.randrange(2)])
            ours.reorder_cache(rows)
            theirs.reorder_cache(rows)
        elif act == "copy":
            twin = copy.deepcopy(ours)
            twin.update(*new)
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        elif act == "reset" and source.random() < 0.2:
            ours.reset()
            theirs.reset()
        assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.is_initialized == theirs.is_initialized
    if ours.is_initialized:
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def test_growing_copies_rarely() -> None:
    layer, copies, buffer = GrowingLayer(), 0, None
    for _ in range(400):
        layer.update(torch.ones(1, 1, 50, 1), torch.ones(1, 1, 50, 1))
        copies, buffer = copies + (layer._buffers[0] is not buffer), layer._buffers[0]
    assert copies < 15  # fixed steps of 256 positions would be more than 60


def test_an_emptied_layer_takes_another_number_of_rows() -> None:
    """Machine code writes to all rows, whatever the buffers have."""
    layer = GrowingLayer()
    layer.extended((1, 2, 4, 8))
    assert layer.keys.shape[-2] == 4
    layer.extended((1, 2, 1, 8))
    layer.crop(-5)
    assert layer.get_seq_length() == 0
    assert len(layer.extended((3, 2, 4, 8))[0]) == 3


def test_passes_in_16_bits_and_of_machine_code_take_turns() -> None:
    """Each gets its own format, in which all positions are."""
    layer, keys = GrowingLayer(), torch.randn(1, 2, 4, 8).bfloat16()
    layer.update(keys, keys)
    buffers = layer.extended((1, 2, 1, 8))
    assert [part.dtype for part in (*buffers, layer.keys)] == [torch.float32] * 3
    assert torch.equal(buffers[0][:, :, :4], keys.float()) and layer.get_seq_length() == 5
    every = layer.update(keys, keys)
    assert [part.dtype for part in every] == [torch.bfloat16] * 2 and every[0].shape[-2] == 9
    assert torch.equal(every[0][:, :, :4], keys) and torch.equal(every[1][:, :, 5:], keys)


def test_a_reset_releases_the_buffers() -> None:
    layer = GrowingLayer()
    layer.update(torch.ones(1, 1, 5, 1), torch.ones(1, 1, 5, 1))
    layer.reset()
    assert not layer._buffers


def test_a_cache_made_without_layers_grows_in_place_too() -> None:
    cache = new_cache(None)
    cache.update(torch.ones(1, 1, 5, 1), torch.ones(1, 1, 5, 1), 0)
    assert type(cache.layers[0]) is GrowingLayer


def test_only_full_attention_layers_are_replaced() -> None:
    assert {type(layer) for layer in new_cache(tiny_llama().config).layers} == {GrowingLayer}
    assert {type(layer) for layer in new_cache(tiny_sliding().config).layers} == {DynamicSlidingWindowLayer}
    assert type(DynamicLayer()) is DynamicLayer
