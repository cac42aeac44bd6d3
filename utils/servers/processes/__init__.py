"""Server programs that this program starts on this machine, and that end with it."""
