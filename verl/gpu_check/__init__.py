"""`verl gpu-check`: whether this machine, its drivers and its packages do what a run needs, one stage after another.

Each stage runs in a process of its own, compares results with others that were computed in a simpler way, and prints
one line. The same stages run on the CPU, each in the way that the CPU has. Only `verl.commands` imports this package.
"""
