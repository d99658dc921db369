"""Sandbox for programs that a model wrote; used by the code scorer."""
