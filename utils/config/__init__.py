"""What a user chooses: settings and their value types, flags, the config file."""
