"""`actor_rollout_ref.rollout.*`: the rollout engines."""

from __future__ import annotations

from typing import Any, Literal

from verl.config.rollout_engines import DEFAULT_ENGINE, list_rollout_engines
from verl.config.schema.base import Count, Positive, RegisteredName, Section, section, setting
from verl.config.schema.conditions import BY_SAMPLES, BY_TOKENS, OnlyIf, needs, needs_engine, needs_given, unless

_HAS_GPU = unless("trainer.device", "cpu", reason="trainer.device=cpu; set {section}.cpu_cache_gib")
_HAS_NO_GPU = unless("trainer.device", "cuda", reason="trainer.device=cuda; set {section}.gpu_memory_utilization")
_ADAPTER = "actor_rollout_ref.actor.peft.lora_rank"
_HAS_ADAPTER = unless(_ADAPTER, 0, reason=f"{_ADAPTER}=0 means no adapter")
_ALWAYS_COMPARES = needs(".calculate_log_probs", reason="the engine's log-probs cost nothing and are always compared")
_HYBRID = "actor_rollout_ref.hybrid_engine"
_HAS_OWN_DEVICES = unless(_HYBRID, True, reason=f"{_HYBRID}=True: engines use the devices of the train workers")
_HAS_SUPPORT = needs_engine("actor_rollout_ref.rollout.name")
_HAS_TURNS = needs(".multi_turn.enable")
_SAMPLES = unless(".do_sample", False, reason="{section}.do_sample=false means greedy decoding")
_HAS_TEMPERATURE = unless(".temperature", 0, reason="{section}.temperature=0 means greedy decoding")


class ValidationSampling(Section):
    temperature: float = setting(0.0, ge=0, only_if=_SAMPLES)
    """Sampling temperature in validation; 0: greedy."""
    top_p: float = setting(1.0, gt=0, le=1, only_if=(_SAMPLES, _HAS_TEMPERATURE))
    """Nucleus sampling in validation."""
    top_k: int = setting(-1, ge=-1, only_if=(_SAMPLES, _HAS_TEMPERATURE))
    """Sample from the k most likely tokens; -1: from all."""
    n: Count = setting(1, unit="responses")
    """Responses per validation prompt."""
    do_sample: bool | None = setting(None)
    """false: greedy at any temperature; null: the temperature decides."""


class MultiTurnConfig(Section):
    enable: bool = setting(False)
    """Episodes of several turns: tools, environments, custom agents."""
    max_turns: Count | None = setting(None, unit="turns")
    """Maximum turns of the model per episode; null: no limit."""
    max_user_turns: Count | None = setting(None, unit="turns")
    """Maximum turns of tools or the environment per episode; null: no limit."""
    function_tool_path: str | None = setting(None)
    """Python file with @verl.tool functions."""
    tool_config_path: str | None = setting(None)
    """YAML file of tool classes and MCP servers."""
    tool_server: str | None = setting(None)
    """URL of a tool server: MCP (streamable HTTP) or plain JSON."""
    environment: str | None = setting(None)
    """Class that episodes are played against, package.module:class or file.py:class."""
    format: Literal["hermes", "qwen3_coder", "llama3_json", "gpt-oss", "glm", "deepseek", "kimi"] | None = setting(None)
    """How the model writes tool calls; null: as its chat template says."""
    max_parallel_calls: Count = setting(1, unit="calls")
    """Maximum tool calls per turn."""
    max_invalid_calls: int = setting(3, unit="calls", ge=0)
    """Tool calls per episode that cannot be read or run; with one more the episode ends."""
    max_tool_response_length: Count = setting(256, unit="characters")
    """Longer results of tools are truncated."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = setting("middle")
    """Where results of tools are truncated."""
    use_inference_chat_template: bool = setting(False)
    """Render the whole conversation for every turn, each a branch of its own; false: append to what was generated."""
    tokenization_sanity_check_mode: Literal["strict", "disable"] = setting("strict")
    """Whether chat templates that rewrite earlier turns are refused."""
    deadline_s: Positive = setting(3600.0, unit="seconds")
    """An episode that takes longer ends as it is."""
    tool_deadline_s: Positive = setting(60.0, unit="seconds")
    """A call of a tool or the environment that takes longer has failed."""


class AgentConfig(Section):
    default_agent_loop: str = setting("tool_agent")
    """tool_agent, single_turn, or package.module:function."""
    agents: dict[str, str] = setting({})
    """Agents that rows may choose with their column agent_name, besides the built-in ones: {name: file.py:function}."""


class GatewayConfig(Section):
    enable: bool = setting(True)
    """Serve the model as an OpenAI-compatible endpoint to agents that take a base_url; others need none."""
    host: str = setting("127.0.0.1", only_if=needs(".enable"))
    """Address to listen on; 0.0.0.0: all addresses, so that agents on other machines can connect."""
    port: int = setting(0, ge=0, le=65535, only_if=needs(".enable"))
    """Port to listen on; each worker of a machine takes the next free one; 0: any free port."""
    max_reward: Positive = setting(100.0, only_if=needs(".enable"))
    """Largest absolute value of a score that an agent posts."""


class RolloutEngineName(RegisteredName):
    @classmethod
    def list_names(cls) -> list[str]:
        return list_rollout_engines()


class EngineArguments(Section):
    vllm: dict[str, Any] = setting({}, only_if=_HAS_SUPPORT)
    """Further engine arguments of vLLM; those that have a setting here are rejected."""
    sglang: dict[str, Any] = setting({}, only_if=_HAS_SUPPORT)
    """Further server arguments of SGLang; those that have a setting here are rejected."""
    external: dict[str, Any] = setting({}, only_if=_HAS_SUPPORT)
    """Arguments of an engine that model.external_lib registers."""


class TraceConfig(Section):
    backend: Literal["mlflow"] | None = setting(
        None,
        only_if=OnlyIf(
            ("trainer.logger",), lambda sinks: "mlflow" in sinks, "trainer.logger has no mlflow, which gets the traces"
        ),
    )
    """Where recorded episodes of training are shown as traces; null: nowhere."""
    max_samples_per_step_per_worker: Count | None = setting(
        None, unit="prompts", only_if=needs_given("actor_rollout_ref.rollout.trace.backend")
    )
    """Prompts of a step whose episodes are traced, and recorded; null: those that trainer.samples records."""


class RolloutConfig(Section):
    name: RolloutEngineName = setting(DEFAULT_ENGINE)
    """Rollout engine; hf: transformers, for debugging."""
    python: str | None = setting(None)
    """Python interpreter of another environment with verl in which the engines run; null: this one."""
    n: Count = setting(1, unit="responses")
    """Responses per prompt; GRPO needs a group of 8 or more."""
    temperature: float = setting(1.0, ge=0)
    """Sampling temperature."""
    top_p: float = setting(1.0, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int = setting(-1, ge=-1)
    """Sample from the k most likely tokens; -1: from all."""
    keep_sampling_mask: bool = setting(False)
    """Train with log-probs over the tokens that top_k and top_p kept; needs a top_k."""
    val_kwargs: ValidationSampling = section(ValidationSampling, "Sampling in validation.")
    num_engines: Count | None = setting(None, unit="engines")
    """Rollout engines; null: all devices / devices per engine."""
    nnodes: Count | None = setting(None, unit="nodes", only_if=_HAS_OWN_DEVICES)
    """Nodes of the engines' own devices; null: one."""
    n_gpus_per_node: Count | None = setting(None, unit="devices", only_if=_HAS_OWN_DEVICES)
    """The engines' own devices on each of their nodes."""
    lend_train_devices: bool = setting(False, only_if=_HAS_OWN_DEVICES)
    """More engines on the devices of the train workers: they generate while those wait, and sleep while they train."""
    total_rollout_steps: Count | None = setting(None, unit="prompts")
    """Prompts of the run; sets trainer.total_training_steps to this / data.train_batch_size; null: not given."""
    tensor_model_parallel_size: Count = setting(1, unit="devices", only_if=_HAS_SUPPORT)
    """Devices per engine that divide each layer, on one node."""
    pipeline_model_parallel_size: Count = setting(1, unit="stages", only_if=_HAS_SUPPORT)
    """Stages of layers per engine, on one node; multiplies its devices."""
    data_parallel_size: Count = setting(1, unit="copies", only_if=_HAS_SUPPORT)
    """Copies of the attention per engine of an MoE; multiplies its devices."""
    expert_parallel_size: Count = setting(1, unit="devices", only_if=_HAS_SUPPORT)
    """Devices per engine that divide the experts; 1, or all of them, or a part of them with SGLang."""
    gpu_memory_utilization: float = setting(0.5, gt=0, le=1, only_if=(_HAS_SUPPORT, _HAS_GPU))
    """Fraction of an accelerator's memory that an engine uses."""
    free_cache_engine: bool | None = setting(None)
    """Engines free their memory while the model trains on the same devices; null: yes, on accelerators."""
    cpu_cache_gib: Count = setting(1, unit="GiB", only_if=(_HAS_SUPPORT, _HAS_NO_GPU))
    """Memory of an engine's key-value cache on CPU."""
    max_num_seqs: Count | None = setting(None, unit="sequences", only_if=_HAS_SUPPORT)
    """Maximum sequences that an engine generates at once; null: 256 on CPU, else chosen by the engine."""
    max_num_batched_tokens: Count | None = setting(None, unit="tokens", only_if=_HAS_SUPPORT)
    """Maximum tokens per engine pass; null: chosen by the engine, on accelerators for throughput."""
    max_model_len: int | None = setting(None, unit="tokens", ge=2, only_if=_HAS_SUPPORT)
    """Maximum sequence length; null: data.max_prompt_length + data.max_response_length."""
    enforce_eager: bool | None = setting(None, only_if=_HAS_SUPPORT)
    """Disable CUDA graphs: faster startup, slower generation; null: only on CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = setting("auto")
    """Type of the computation; auto: same as the actor; fp8: bfloat16 with quantization=fp8."""
    quantization: Literal["fp8", "fp8_per_block", "fp8_per_channel", "fp8_per_tensor"] | None = setting(None)
    """How vLLM quantizes the weights that it is sent, on accelerators; fp8: per block; null: not at all."""
    load_format: Literal["dummy", "auto", "safetensors"] = setting("dummy", only_if=_HAS_SUPPORT)
    """What an engine loads at startup; dummy: nothing, if the first weight sync brings all weights."""
    weight_transport: Literal["auto", "host", "nccl", "ipc"] = setting("auto")
    """How weights reach the engines; auto: ipc or nccl once `verl gpu-check` has passed, else host memory."""
    update_weights_bucket_megabytes: Count = setting(512, unit="MiB")
    """Size of the buckets in which weights are sent; three may exist at a time."""
    lora_transport: Literal["auto", "adapter", "merged"] = setting("auto", only_if=_HAS_ADAPTER)
    """Send engines the adapter only, or merged weights; auto: the adapter only, if possible."""
    probe_tolerance: Positive | None = setting(None, unit="nats")
    """Maximum mean log-prob difference to the trainer after a weight sync; null: derived from rounding."""
    calculate_log_probs: bool = setting(True, only_if=_ALWAYS_COMPARES)
    """Compare log-probs of engine and trainer; always on."""
    log_prob_micro_batch_size_per_gpu: Count | None = setting(None, unit="samples", only_if=BY_SAMPLES)
    """Samples per rank and pass; null: same as the actor."""
    log_prob_max_token_len_per_gpu: Count | None = setting(None, unit="tokens", only_if=BY_TOKENS)
    """Tokens per rank and pass; null: same as the actor."""
    engine_kwargs: EngineArguments = section(EngineArguments, "Arguments for the engine itself.")
    trace: TraceConfig = section(TraceConfig, "Traces of episodes.")
    multi_turn: MultiTurnConfig = section(MultiTurnConfig, "Multi-turn episodes and tools.", only_if=_HAS_TURNS)
    agent: AgentConfig = section(AgentConfig, "What happens in a multi-turn episode.", only_if=_HAS_TURNS)
    gateway: GatewayConfig = section(
        GatewayConfig, "The endpoint of agents that were written with other SDKs.", only_if=_HAS_TURNS
    )
