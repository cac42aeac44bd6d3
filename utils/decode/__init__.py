"""One run of one model: session, cache, noise, decoding parameters, steps and drafts."""
