"""The parts of /verdict.

plan chooses the prompts, selection finds a local candidate on some of them, measurement runs a candidate against its
baseline on the others, figures computes the rows, wording turns them into sentences, and elsewhere lists equivalent
settings.
"""
