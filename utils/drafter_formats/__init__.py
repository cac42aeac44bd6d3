"""Published drafters: one module per checkpoint format. See README.md."""
