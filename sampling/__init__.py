"""Decoders over token ids (autoregressive, speculative, beam search), for decoder-only and encoder-decoder models."""

import os

# Before torch is imported: spinning threads make a decode step many times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from sampling.autoregressive import (
    autoregressive_generate,
    autoregressive_generate_encoder_decoder,
    autoregressive_steps,
)
from sampling.beam_search import BeamWidth, beam_search_generate, beam_search_steps
from sampling.drafters.adaptive_gamma import AdaptiveGamma
from sampling.drafters.feature_sessions import FreeHead, HeadDrafter, HeadSession
from sampling.drafters.model import ChainDrafter, ModelDrafter
from sampling.speculative import speculative_generate, speculative_generate_encoder_decoder, speculative_steps
from sampling.verification import RULES, Rule, choose_rule, verify_block, verify_one_hot, verify_rejection
from utils.decode.drafts import Draft, Drafter, Verified

__all__ = [
    "RULES",
    "AdaptiveGamma",
    "BeamWidth",
    "ChainDrafter",
    "Draft",
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
