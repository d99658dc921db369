"""The buffer between generation and training: which groups of episodes start, which are trained, what is reported.

`admission` decides what may start, `selection` what a step takes, `signal` which groups have something to learn from,
and `report` writes metrics and warnings. Only the trainer imports this package.
"""
