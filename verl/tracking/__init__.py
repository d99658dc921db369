"""Metrics and timers, the console, metric loggers, and advice about training problems. Plain Python and rich, no torch;
any package above may import it."""
