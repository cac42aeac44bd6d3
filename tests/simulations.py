"""Simulations of measurements."""

FEWER = 1000  # resamples of an interval, a quarter of the program's: its bounds move by about one percent of its width
