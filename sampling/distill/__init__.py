"""Distillation: train a drafter for any target on the target's own text. Run it as `python -m sampling.distill`."""
