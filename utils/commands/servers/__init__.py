"""/server and its subcommands, one module each."""
