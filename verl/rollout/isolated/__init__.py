"""A rollout engine in another Python environment: `engine` calls `server`, a process of that environment."""
