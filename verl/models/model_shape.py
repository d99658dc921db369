"""The shape of a language model, from its Hugging Face configuration: how many parameters it has, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.errors import ConfigError
from verl.models.model_folder import count_experts, text_config


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only model: `layers` of attention and a gated MLP, or (MoE) of `experts` such MLPs.

    `width` is the size of the hidden states, `mlp` of an MLP or expert. A token passes `experts_per_token` experts.
    """

    vocabulary: int
    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    experts: int = 0
    experts_per_token: int = 1
    is_tied: bool = False  # the embeddings are also the weight of the last layer
    has_value_head: bool = False  # a critic: one number instead of logits

    @classmethod
    def from_config(
        cls, config: dict[str, Any], name: str = "config.json", *, has_value_head: bool = False
    ) -> ModelShape:
        """Read the shape from the content of a model's config.json; `name` is for messages."""
        text = text_config(config)
        required = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        if missing := [key for key in required if not text.get(key)]:
            raise ConfigError([f"{name}: has no {', '.join(missing)}; memory can be estimated for decoder-only models"])
        width, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        experts = count_experts(config)
        mlp = text.get("moe_intermediate_size") if experts else None
        return cls(
            vocabulary=int(text["vocab_size"]),
            width=width,
            mlp=int(mlp or text.get("intermediate_size") or 4 * width),
            layers=int(text["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_width=int(text.get("head_dim") or width // heads),
            experts=experts,
            experts_per_token=int(text.get("num_experts_per_tok") or 1),
            is_tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            has_value_head=has_value_head,
        )

    def count_operations(self, context: float) -> float:
        """Return the floating-point operations of a forward pass per token that attends to `context` tokens."""
        return 2 * self.active_parameters + 4 * self.layers * self.attention_width * context

    @property
    def attention_width(self) -> int:
        """The size of all queries of a token."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """The size of all keys of a token, and of all values."""
        return self.kv_heads * self.head_width

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, the unit of sharding."""
        projections = self.width * (2 * self.attention_width + 2 * self.kv_width)
        return projections + 2 * self.width + max(1, self.experts) * 3 * self.width * self.mlp + self._router

    def gathered_parameters(self, expert_ranks: int = 1) -> int:
        """Return the parameters of a layer that one rank gathers, if its experts are distributed over several."""
        return self.layer_parameters - self.experts * 3 * self.width * self.mlp * (expert_ranks - 1) // expert_ranks

    def padded_parameters(self, ranks: int) -> int:
        """Return the size of a gathered layer, whose shards are padded to the largest.

        With more ranks than experts, most of it is padding.
        """
        return ranks * self._count_layer_shard(ranks)

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: the embeddings and the last layer."""
        is_single = self.is_tied or self.has_value_head
        return self.vocabulary * self.width * (1 if is_single else 2) + self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    def count_largest_shard(self, ranks: int) -> int:
        """Return the parameters of the rank that has most: a tensor is divided by whole rows, experts are such rows."""
        rows, width = -(-self.vocabulary // ranks), self.width
        root = rows * width * (1 if self.is_tied or self.has_value_head else 2) + -(-width // ranks)
        return root + self.layers * self._count_layer_shard(ranks)

    def _count_layer_shard(self, ranks: int) -> int:
        def rows(count: int) -> int:
            return -(-count // ranks)

        width = self.width
        attention = (rows(self.attention_width) + 2 * rows(self.kv_width)) * width + rows(width) * self.attention_width
        if self.experts:
            mlp = rows(self.experts) * (3 * width * self.mlp + width)
        else:
            mlp = 2 * rows(self.mlp) * width + rows(width) * self.mlp
        return attention + mlp + 2 * rows(width)

    @property
    def active_parameters(self) -> int:
        """Parameters that compute one token: without the embeddings, and only the experts that it passes."""
        idle = max(0, self.experts - self.experts_per_token) * 3 * self.width * self.mlp
        head = 0 if self.has_value_head else self.vocabulary * self.width
        return self.layers * (self.layer_parameters - idle) + head

    @property
    def rows(self) -> int:
        """Rows of the MLPs per token."""
        return self.experts_per_token if self.experts else 1

    def forward_token_bytes(self, size: int) -> int:
        """Return the bytes per token in the middle of a layer without gradients, in its MLP; `size` is a number's."""
        routed = 2 * size * self.width * self.rows if self.experts else 0
        return size * (3 * self.mlp * self.rows + 4 * self.width) + routed

    def saved_token_bytes(self, size: int) -> int:
        """Return the bytes per token that a layer saves for its backward pass, in norms, attention and MLP."""
        norms = 2 * (4 + 2 * size) * self.width
        attention = size * (2 * self.attention_width + 2 * self.kv_width) + 4 * self.heads
        routed = 2 * size * self.width * self.rows if self.experts else 0
        return norms + attention + 4 * size * self.mlp * self.rows + routed

    def backward_token_bytes(self, size: int) -> int:
        """Return the bytes per token at the peak of a backward pass of a layer: what it saved, gradients in its MLP."""
        return self.saved_token_bytes(size) + 2 * size * self.mlp * self.rows

    @property
    def _router(self) -> int:
        return self.experts * self.width
