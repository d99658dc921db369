"""Processes that run user code (reward functions, tools): the pool, its supervisors and workers. Imported by agents,
workers and trainer."""
