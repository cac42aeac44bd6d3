"""Everything that is drawn, and the only place that writes to the terminal."""
