"""Slash commands that run models."""
