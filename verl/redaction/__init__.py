"""Recognizing secrets, and removing them from text that leaves a run."""

from verl.redaction.names import is_secret_name
from verl.redaction.shapes import HIDDEN
from verl.redaction.text import redact, redact_settings, remember, remember_arguments, show_controls

__all__ = ["HIDDEN", "is_secret_name", "redact", "redact_settings", "remember", "remember_arguments", "show_controls"]
