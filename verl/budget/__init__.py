"""What a run needs, before it starts: memory by phase, time, and the settings that make it fit.

`memory`, `timing` and `advice` are arithmetic and import no torch; `measure` runs the training engine on fake tensors.
"""
