"""The record of a setting that does not fit the others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Conflict:
    """A setting that cannot work with the others, or in a hint: that is probably a mistake.

    `reason` and `fix` name in full each other setting whose default could cause the conflict: if one of these settings
    is itself invalid and was replaced by its default, the conflict is not reported.

    Attributes:
        key: The setting.
        reason: What is wrong; usually begins with the value.
        fix: How to fix it: an instruction, or "=value" to set the key to `value`; empty if there are many ways.

    Example:
        >>> print(Conflict("trainer.logger", "wandb requires a package", "=[console], or install it"))
        trainer.logger: wandb requires a package; set trainer.logger=[console], or install it
    """

    key: str
    reason: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f"set {self.key}{self.fix}" if self.fix.startswith("=") else self.fix
        return f"{self.key}: {self.reason}" + (f"; {fix}" if fix else "")
