"""Episodes: coroutines that request tokens any number of times and end as a scored sample; a single-turn response is
the simplest episode. Episodes get a `generate` callable, never an engine. Imported by trainer and workers."""
