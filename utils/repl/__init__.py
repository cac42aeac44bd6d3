"""The running program: session, runner, line input, status line."""
