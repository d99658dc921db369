"""Isolation for programs that a model wrote. Imported by the code scorer."""
