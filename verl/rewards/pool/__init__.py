"""The processes that run a reward function: the pool, its supervisors and workers. Imported by workers and trainer."""
