"""Memory and time of a run before it starts: memory by phase, in closed form, and the settings with which a run fits.

Nothing here imports torch. Trainers and commands may import this package; it imports settings of workers and below.
"""
