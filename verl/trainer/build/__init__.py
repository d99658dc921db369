"""Builds a run from its settings: processes (`runtime`, `placement`), data, settings of workers, checks before the
start (`preflight`), and the trainer (`rl_builder`). Imported by the launcher, by sft and by commands."""
