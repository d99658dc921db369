"""Episodes: coroutines that ask for tokens any number of times and end as a scored sample. A single-turn answer is the
trivial one. They are handed a `generate` callable, never an engine. Imported by trainer and workers' callers."""
