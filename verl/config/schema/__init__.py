"""The settings themselves, one file a section; the roots are `Config` (reinforcement learning) and `SftConfig`. For the
rest of `verl.config` and all above."""

from verl.config.schema.base import MISSING, OWN_FUNCTION, Section, Setting, settings_of
from verl.config.schema.root import Config
from verl.config.schema.sft import SftConfig

__all__ = ["MISSING", "OWN_FUNCTION", "Config", "Section", "Setting", "SftConfig", "settings_of"]
