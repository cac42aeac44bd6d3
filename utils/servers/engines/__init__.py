"""What differs between inference engines behind the same protocol: one module per engine."""
