"""The settings themselves, one file a section; the roots are `Config` (reinforcement learning) and `SftConfig`. For the
rest of `verl.config` and all above."""

from verl.config.schema.base import CUSTOM_FUNCTION, MISSING, Section, Setting, collect_settings
from verl.config.schema.root import Config
from verl.config.schema.sft import SftConfig

__all__ = ["CUSTOM_FUNCTION", "MISSING", "Config", "Section", "Setting", "SftConfig", "collect_settings"]
