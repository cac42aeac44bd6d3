"""/verdict: does speculative decoding help here, with which settings, and is the text the target's own?

plan chooses the prompts, selection finds a candidate on some of them, measurement runs it against the target alone on
the others, analysis computes the figures, wording turns them into sentences, and elsewhere lists equivalent settings.
"""
