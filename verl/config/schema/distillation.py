"""`distillation.*`: a teacher model that the policy learns from, on its own responses."""

from __future__ import annotations

from typing import Literal

from verl.config.schema.base import Count, Positive, Section, section, setting
from verl.config.schema.conditions import HAS_DEVICE_MEMORY, needs


class TeacherConfig(Section):
    path: str | None = setting(None)
    """Hugging Face name or local directory of the teacher; it has the same tokens."""
    use_own_chat_template: bool = setting(False)
    """Render prompts for the teacher with its own chat template; false: with the policy's."""
    param_offload: bool = setting(False, only_if=HAS_DEVICE_MEMORY)
    """Move the teacher's weights to host memory while they are not in use."""


class DistillationConfig(Section):
    enable: bool = setting(False)
    """Train the policy toward a teacher model, on the policy's own responses."""
    teacher: TeacherConfig = section(TeacherConfig, "The teacher, which is never trained.")
    mode: Literal["reward", "loss"] = setting("reward")
    """The KL to the teacher: reward: of each sampled token, in its advantage; loss: loss_mode, in the loss."""
    loss_mode: Literal["full", "forward_kl", "forward_kl_topk"] = setting("full", only_if=needs(".mode", "loss"))
    """KL in the loss; full: from the policy to the teacher; forward_kl: from the teacher; _topk: over its topk."""
    topk: Count = setting(32, unit="tokens", only_if=needs(".loss_mode", "forward_kl_topk"))
    """Tokens to which the teacher gives the highest probabilities (forward_kl_topk)."""
    coef: Positive = setting(1.0)
    """Coefficient of the KL to the teacher."""
    log_prob_min_clamp: float | None = setting(None, unit="nats", lt=0)
    """Lower bound of the log-probs of policy and teacher in their KL; null: no bound."""
    loss_max_clamp: Positive | None = setting(None, unit="nats")
    """Largest KL of a token, above and below 0; in mode=loss a token beyond it has no gradient; null: no limit."""
    use_task_rewards: bool = setting(True)
    """Also learn from rewards; false: learn from the teacher alone, without scoring training responses."""
