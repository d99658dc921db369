"""Metrics and timers, the console, metric loggers, advice about training problems, and reading what a run wrote. Plain
Python, rich and pyarrow, no torch; any package above may import it."""
