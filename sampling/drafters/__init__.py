"""Drafters that are models: a model, a draft head, a model with a different tokenizer, a chain of two."""
