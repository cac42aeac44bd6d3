"""Server programs that this program starts on this machine and ends at its exit."""
