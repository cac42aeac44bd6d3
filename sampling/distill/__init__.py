"""Distillation: a drafter for any target, made of the target's own text. Run it as `python -m sampling.distill`."""
