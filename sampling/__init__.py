"""Decoders over token ids: plain, speculative, beam search; for decoder-only and encoder-decoder models."""

import os

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # before torch: spinning threads make a step many times slower on a busy machine

from sampling.adaptive_gamma import DraftLength
from sampling.autoregressive import (
    autoregressive_generate,
    autoregressive_generate_encoder_decoder,
    autoregressive_steps,
)
from sampling.beam_search import BeamWidth, beam_search_generate, beam_search_steps
from sampling.drafters.chain import ChainDrafter
from sampling.drafters.head import FreeHead, HeadDrafter, HeadSession
from sampling.drafters.model import Draft, Drafter, ModelDrafter, Verified
from sampling.speculative import speculative_generate, speculative_generate_encoder_decoder, speculative_steps
from sampling.verification import RULES, Rule, choose_rule, verify_block, verify_one_hot, verify_rejection

__all__ = [
    "RULES",
    "BeamWidth",
    "ChainDrafter",
    "Draft",
    "DraftLength",
    "Drafter",
    "FreeHead",
    "HeadDrafter",
    "HeadSession",
    "ModelDrafter",
    "Rule",
    "Verified",
    "autoregressive_generate",
    "autoregressive_generate_encoder_decoder",
    "autoregressive_steps",
    "beam_search_generate",
    "beam_search_steps",
    "choose_rule",
    "speculative_generate",
    "speculative_generate_encoder_decoder",
    "speculative_steps",
    "verify_block",
    "verify_one_hot",
    "verify_rejection",
]
