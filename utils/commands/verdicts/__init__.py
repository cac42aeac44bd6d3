"""The parts of /verdict: measurement runs a candidate beside its baseline, selection finds it, and wording tells."""
