"""Servers with an OpenAI-compatible interface: their addresses, one client for all of them, and what they answer."""
