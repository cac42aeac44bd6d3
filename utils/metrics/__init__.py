"""A run seen from outside: results, timings, draft traces, costs, divergence."""
