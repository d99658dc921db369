"""Checks before a run, for `verl train --dry-run`, `verl doctor` and `verl reward-test`: one module per topic. None starts
an engine; only the checks of memory and of a running cluster import Ray. Imported by commands."""
