"""Checks before a run, for `verl train --dry-run`, `verl doctor` and `verl reward-test`: one module per topic, and no
engine, Ray or torch. Imported by commands."""
