"""The application around the decoders, and the modules that the decoders build on."""

__version__ = "0.1.0"
