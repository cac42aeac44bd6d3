"""What every command is made of: the registry, what a command requests, output files, commands of settings."""
