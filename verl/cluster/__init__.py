"""Ray, and nothing of RL: connecting, placing processes on devices, groups of actors, deadlines. Imported by workers,
trainer and cli; imports config and errors only."""
