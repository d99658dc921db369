"""The settings themselves, one file a section; `Config` is the root. For the rest of `verl.config` and all above."""

from verl.config.schema.base import MISSING, OWN_FUNCTION, Section, Setting, settings_of
from verl.config.schema.root import Config

__all__ = ["MISSING", "OWN_FUNCTION", "Config", "Section", "Setting", "settings_of"]
