"""Checks before a run, for `verl doctor`, `verl train --dry-run` and `verl reward-test`: one module per topic.

None starts an engine; only the checks of memory and of a running cluster import Ray. Commands import them.
"""
