"""Decoders over token ids: plain, speculative, beam search; for decoder-only and encoder-decoder models."""

from sampling.autoregressive import autoregressive_generate, autoregressive_generate_encoder_decoder, autoregressive_steps
from sampling.beam_search import BeamWidth, beam_search_generate, beam_search_steps
from sampling.drafting import Draft, Drafter, ModelDrafter, Verified
from sampling.speculative import speculative_generate, speculative_generate_encoder_decoder, speculative_steps
from sampling.verification import verify, verify_one_hot, verify_rejection

__all__ = [
    "BeamWidth",
    "Draft",
    "Drafter",
    "ModelDrafter",
    "Verified",
    "autoregressive_generate",
    "autoregressive_generate_encoder_decoder",
    "autoregressive_steps",
    "beam_search_generate",
    "beam_search_steps",
    "speculative_generate",
    "speculative_generate_encoder_decoder",
    "speculative_steps",
    "verify",
    "verify_one_hot",
    "verify_rejection",
]
