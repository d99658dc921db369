"""Hang detection: what each process waits for, and who is named when a deadline passes."""
