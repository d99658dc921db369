"""Ray, and nothing of RL: sessions, placement of actors on devices, actor groups, and hang detection (`hangs`).
Imported by workers, trainer and commands; imports config, errors and redaction only."""
