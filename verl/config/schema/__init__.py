"""The declared settings, one module per section; the roots are `Config` (`verl train`) and `SftConfig` (`verl sft`)."""

from verl.config.schema.base import CUSTOM_FUNCTION, MISSING, Section, Setting, collect_settings
from verl.config.schema.conditions import OnlyIf
from verl.config.schema.root import Config
from verl.config.schema.sft import SftConfig

__all__ = ["CUSTOM_FUNCTION", "MISSING", "Config", "OnlyIf", "Section", "Setting", "SftConfig", "collect_settings"]
