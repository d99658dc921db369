"""A rollout engine in another Python environment: `engine` sends `messages` to `server`, a process there."""
