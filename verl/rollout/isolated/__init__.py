"""A rollout engine in another Python environment: `engine` starts a process of that environment and calls it,
`server` is that process, `messages` is what they send each other."""
