"""Mistakes in files: models, data, reward functions, tools, folders, addresses; and the files that have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from _mistakes import A, Mistake, write_yaml

M, TURNS = "actor_rollout_ref.model", "actor_rollout_ref.rollout.multi_turn"
OWN = "reward.custom_reward_function"
PATH = f"{OWN}.path"
WRITES = "trainer.save_freq=1 trainer.default_local_dir"
AGENT = "rollout.multi_turn.enable=true"
TOOLS = f"{AGENT} rollout.multi_turn.function_tool_path"
HERMES = f"{AGENT} rollout.multi_turn.format=hermes"

MODELS = (
    Mistake("model.path=./modl", f"{M}.path=./modl", f"set {M}.path=model"),
    Mistake("model.path=/no/such/model", f"{M}.path=/no/such/model", "set"),
    Mistake("model.path=checkpoint/global_step_3", f"{M}.path", "verl merge"),
    Mistake("model.path=models/no_config", f"{M}.path=models/no_config", "download the whole folder"),
    Mistake("model.path=models/bad_config", f"{M}.path=models/bad_config", "download the whole folder"),
    Mistake("model.path=models/no_weights", f"{M}.path=models/no_weights", "download the whole folder"),
    Mistake("model.path=models/missing_shard", f"{M}.path=models/missing_shard", "download the whole folder"),
    Mistake("model.path=models/cut_weights", f"{M}.path=models/cut_weights", "download the whole folder"),
    Mistake("model.path=models/no_tokenizer", f"{M}.path=models/no_tokenizer", "save the tokenizer"),
    Mistake("model.path=models/t5", f"{M}.path", "use a causal language model"),
    Mistake("model.path=models/vision", f"{M}.path", "use a text model"),
    Mistake("model.path=models/quantized", f"{M}.path", "use the original model"),
    Mistake("model.path=models/mamba", f"{M}.path", "supported are"),
    Mistake("model.path=models/foreign_code", f"{M}.path", "remove the line"),
    Mistake("model.path=models/no_template", "data.train_files", "use a model that has one"),
    Mistake("model.path=models/bad_template", "prompts", "fix the messages"),
    Mistake("data.max_response_length=1000", "data.max_prompt_length + ", "data.max_response_length=448"),
    Mistake("model.lora_adapter_path=adaptr", "actor_rollout_ref.model.lora_adapter_path", "PEFT adapter"),
    Mistake("actor.router_replay.mode=R2", f"{A}.router_replay.mode", f"set {A}.router_replay.mode=disabled"),
)

DATA = (
    Mistake("data.train_files=tran.parquet", "data.train_files", "Did you mean train.parquet?"),
    Mistake("data.train_files=nowhere/train.parquet", "data.train_files", "Set data.train_files"),
    Mistake("data.train_files=model", "data.train_files", "Set data.train_files"),
    Mistake("data.train_files=part-*.parquet", "data.train_files", "Did you mean train.parquet?"),
    Mistake("data.train_files=[train.parquet,valid.jsonl]", "data.train_files", "Set data.train_files"),
    Mistake("data.train_files=data/rows.csv", "data.train_files", "convert it"),
    Mistake("data.train_files=data/text.parquet", "data.train_files", "Write it again"),
    Mistake("data.train_files=data/cut.parquet", "data.train_files", "Write it again"),
    Mistake("data.train_files=data/empty.parquet", "data.train_files", "fill the file"),
    Mistake("data.train_files=data/broken.jsonl", "data.train_files", "Each line must be one JSON object"),
    Mistake("data.train_files=data/lists.jsonl", "data.train_files", "each line must be one JSON object"),
    Mistake("data.train_files=data/question.parquet", "data.train_files", "Set data.prompt_key=question"),
    Mistake("data.prompt_key=promt", "data.train_files", "Set data.prompt_key=prompt"),
    Mistake("data.curriculum_key=difficulty", "data.train_files", "Set data.curriculum_key"),
    Mistake("data.val_files=tets.parquet", "data.val_files", "Did you mean"),
    Mistake("data.train_files=data/null_prompt.parquet", "data.train_files", "prompt"),
    Mistake("data.train_files=data/no_content.parquet", "data.train_files", "content"),
    Mistake("data.train_files=data/blank.parquet", "data.train_files", "fill it", stops=False),
    Mistake("data.train_files=data/long.parquet", "data.train_files", "set data.max_prompt_length="),
    Mistake(
        "data.train_files=data/long.parquet data.filter_overlong_prompts=true data.max_prompt_length=8",
        "data.train_files",
        "set data.max_prompt_length=",
    ),
    Mistake(
        "data.train_files=data/long.parquet data.truncation=left",
        "data.train_files",
        "data.max_prompt_length=",
        stops=False,
    ),
    Mistake("data.train_files=data/no_truth.parquet", "data.train_files", "ground_truth"),
    Mistake("data.train_files=data/source.parquet", "data.train_files", "did you mean 'gsm8k'?"),
    Mistake("data.train_files=data/no_source.parquet", "data.train_files", "Add the column"),
    Mistake("data.train_files=data/truth_text.parquet", "data.train_files", "Write the file again"),
    Mistake("data.train_files=data/twice.parquet", "data.train_files", "remove one of them", stops=False),
    Mistake("data.train_files=data/string.parquet", "data.train_files", "write the prompt as", stops=False),
    Mistake("data.train_files=[train.parquet,data/more.parquet]", "data.train_files", "belong together", stops=False),
    Mistake("data.train_files=[train.parquet,data/empty.parquet] data.train_weights=[1,1]", "data", "fill the file"),
    Mistake("data.sampler=mine.py:sampler", "data.sampler", "importable where the run starts"),
    Mistake("data.sampler=difficulty data.sampler_kwargs.speed=2", "data.sampler", "check data.sampler_kwargs"),
)

REWARDS = (
    Mistake(f"{PATH}=rewrd.py", PATH, "Set the path of a Python file"),
    Mistake(f"{PATH}=rewards/reward.txt", PATH, "end in .py"),
    Mistake(f"{PATH}=no.such.module", PATH, "Set the path of a Python file"),
    Mistake(f"{PATH}=rewards/good.py {OWN}.name=scoer", "reward", f"{OWN}.name=compute_score"),
    Mistake(f"{PATH}=rewards/syntax.py", PATH, "fix the function"),
    Mistake(f"{PATH}=rewards/imports.py", PATH, "install it"),
    Mistake(f"{PATH}=rewards/signature.py", "reward", "declare it as compute_score("),
    Mistake(f"{PATH}=rewards/good.py {OWN}.reward_kwargs.scale=2", "reward", "declare it as compute_score("),
    Mistake(f"{PATH}=rewards/text.py", OWN, "return an explicit score"),
    Mistake(f"{PATH}=rewards/nothing.py", OWN, "return an explicit score"),
    Mistake(f"{PATH}=rewards/nan.py", OWN, "return an explicit score"),
    Mistake(f"{PATH}=rewards/raises.py", OWN, "return an explicit score"),
    Mistake(f"{PATH}=rewards/exits.py", OWN, "it must return for every response"),
    Mistake(f"{PATH}=rewards/hangs.py", OWN, "Make the function faster", stops=False),
    Mistake(f"{PATH}=rewards/constant.py", OWN, "check which answer", stops=False),
    Mistake(f"{PATH}=rewards/inverted.py", OWN, "check which answer", stops=False),
)

AGENTS = (
    Mistake(f"{TOOLS}=tols.py", f"{TURNS}.function_tool_path", "set it to a Python"),
    Mistake(f"{TOOLS}=tools/none.py", f"{TURNS}.function_tool_path", "@verl.tool"),
    Mistake(f"{TOOLS}=tools/raises.py", f"{TURNS}.function_tool_path", "fix the file"),
    Mistake(f"{TOOLS}=tools/good.py", f"{TURNS}.format", "set it to one of"),
    Mistake(f"{HERMES} rollout.multi_turn.function_tool_path=tools/good.py", "data.train_files", "chat template"),
    Mistake(f"{AGENT} rollout.multi_turn.tool_config_path=tools/broken.yaml", "tool_config_path", "docs/agents.md"),
    Mistake(f"{AGENT} rollout.agent.default_agent_loop=mine.py:agent", "default_agent_loop", "importable"),
    Mistake(f"{HERMES} data.train_files=data/agent.parquet", "data.train_files", "declare it in"),
    Mistake(f"{HERMES} data.train_files=data/string.parquet", "data.train_files", "write each prompt as"),
)

PLACES = (
    Mistake(f"{WRITES}=/proc/run", "trainer.default_local_dir", "to another folder"),
    Mistake(f"{WRITES}=train.parquet/run", "trainer.default_local_dir", "another"),
    Mistake("trainer.save_freq=1 model.path=models/huge", "trainer.default_local_dir", "free space"),
    Mistake(
        "trainer.resume_mode=path trainer.resume_from_path=run/global_step_9",
        "trainer.resume_from_path",
        "global_step_N",
    ),
    Mistake("ray_kwargs.ray_init.address=127.0.0.1:1", "ray_kwargs.ray_init.address", "ray start --head"),
    Mistake("reward.sandbox.url=http://127.0.0.1:1/run", "reward.sandbox.url", "start the service"),
    Mistake("trainer.device=cuda", "trainer.device", "set trainer.device=cpu"),
    Mistake("trainer.nnodes=2", "trainer.nnodes", "set ray_kwargs.ray_init.address", stops=False),
    Mistake(
        "trainer.n_gpus_per_node=512 data.train_batch_size=512 actor.ppo_mini_batch_size=512",
        "trainer.n_gpus_per_node",
        "Set trainer.n_gpus_per_node=1",
        stops=False,
    ),
    Mistake(
        "model.path=models/huge rollout.name=vllm data.max_response_length=8192",
        "memory, ",
        "use more devices",
        stops=False,
        options=("--device", "H100"),
    ),
)

FILES = (*MODELS, *DATA, *REWARDS, *AGENTS, *PLACES)

TEN_AT_ONCE = Mistake(
    "trainer.sed=3 data.batch_size=8 rollout.temperature=-1 algorithm.adv_estimator=grop actor.optim.lr=high "
    "trainer.device=gpu data.train_files=tran.parquet data.val_files=tets.parquet model.path=./modl "
    f"{PATH}=rewrd.py",
    "",
    "",
)
"""Ten mistakes in settings, data, model and reward."""


def write_files(folder: Path) -> None:
    """Write everything that the tables name. Imports torch, so it is run in a process of its own."""
    _write_models(folder)
    _write_data(folder)
    _write_rewards(folder / "rewards")
    _write_tools(folder / "tools")
    write_yaml(folder)


def _write_models(folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file
    from tiny import CHAT_TEMPLATE, chat_tokenizer, tiny_qwen2

    good = json.loads(tiny_qwen2().to_json_string(use_diff=False)) | {"architectures": ["Qwen2ForCausalLM"]}
    other_template = "{% for m in messages %}{{ m.contents | upper + 1 }}{% endfor %}"

    def write(path: Path, config: dict[str, Any] | str | None, template: str | None = CHAT_TEMPLATE) -> Path:
        chat_tokenizer(template).save_pretrained(path)
        if config is not None:
            (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        save_file({"model.norm.weight": np.zeros(4, np.float32)}, path / "model.safetensors")
        return path

    models = folder / "models"
    write(folder / "model", good)
    write(models / "no_config", None)
    write(models / "bad_config", "{")
    (write(models / "no_weights", good) / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (write(models / "missing_shard", good) / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = write(models / "cut_weights", good) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    for file in write(models / "no_tokenizer", good).glob("*token*"):
        file.unlink()
    write(models / "t5", good | {"model_type": "t5", "is_encoder_decoder": True})
    write(models / "vision", good | {"vision_config": {"depth": 2}})
    write(models / "quantized", good | {"quantization_config": {"quant_method": "gptq"}})
    write(models / "mamba", good | {"model_type": "mamba"})
    write(models / "foreign_code", good | {"attn_implementation": "someone/kernel"})
    write(models / "no_template", good, None)
    write(models / "bad_template", good, other_template)
    huge = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
    huge |= {"layer_types": ["full_attention"] * 126}
    huge |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
    write(models / "huge", good | huge)
    actor = folder / "checkpoint" / "global_step_3" / "actor"
    actor.mkdir(parents=True)
    (actor / "metadata.json").write_text("{}")
    (actor / "shard-0.safetensors").write_bytes(b"")


def _row(prompt: Any = None, **columns: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "1+1="}] if prompt is None else prompt
    row = {"prompt": prompt, "data_source": "addition", "reward_model": {"ground_truth": "2"}}
    return {name: value for name, value in (row | columns).items() if value is not None}


def _write_data(folder: Path) -> None:
    def write(name: str, rows: list[dict[str, Any]]) -> None:
        pq.write_table(pa.Table.from_pylist(rows), folder / name)

    def talk(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    data = folder / "data"
    data.mkdir()
    good = [_row(talk(f"{index}+1="), reward_model={"ground_truth": str(index + 1)}) for index in range(32)]
    write("train.parquet", good)
    (data / "rows.csv").write_text("prompt,answer\n1+1=,2\n")
    (data / "text.parquet").write_text("this is text")
    (data / "cut.parquet").write_bytes((folder / "train.parquet").read_bytes()[:400])
    pq.write_table(pa.Table.from_pylist(good).slice(0, 0), data / "empty.parquet")
    (data / "broken.jsonl").write_text("".join(json.dumps(row) + "\n" for row in good[:2]) + "{\n")
    (data / "lists.jsonl").write_text("[1, 2]\n")
    write("data/question.parquet", [{"question": row.pop("prompt"), **row} for row in map(dict, good)])
    write("data/null_prompt.parquet", [*good[:2], good[2] | {"prompt": None}])
    write("data/no_content.parquet", [_row([{"role": "user", "contents": "1+1="}])])
    write("data/blank.parquet", [*good, _row(talk(" "))])
    write("data/long.parquet", [*good[:3], _row(talk("1+" * 50 + "1="))])
    write("data/no_truth.parquet", [_row(reward_model={"style": "rule"})])
    write("data/source.parquet", [_row(data_source="gsm8")])
    write("data/no_source.parquet", [{name: row[name] for name in ("prompt", "reward_model")} for row in good])
    write("data/truth_text.parquet", [_row(reward_model='{"ground_truth": "2"}')])
    write("data/twice.parquet", [*good, good[0]])
    write("data/string.parquet", [_row(f"{index}+1=") for index in range(8)])
    write("data/more.parquet", [row | {"difficulty": 3} for row in good])
    write("data/agent.parquet", [_row(agent_name="no_such_agent")])


def _write_rewards(folder: Path) -> None:
    folder.mkdir()
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    "
    bodies = {
        "good": "return float(solution_str == ground_truth)",
        "text": "return 'right'",
        "nothing": "pass",
        "nan": "return float('nan')",
        "raises": "return extra_info['no such key']",
        "exits": "import os; os._exit(3)",
        "hangs": "while True: pass",
        "constant": "return 1.0",
        "inverted": "return float(solution_str != ground_truth)",
    }
    for name, body in bodies.items():
        (folder / f"{name}.py").write_text(f"{head}{body}\n")
    (folder / "reward.txt").write_text(head + bodies["good"])
    (folder / "syntax.py").write_text("def compute_score(:\n")
    (folder / "imports.py").write_text("import a_package_that_nobody_has\n" + head + bodies["good"])
    (folder / "signature.py").write_text("def compute_score(answer):\n    return 1.0\n")


def _write_tools(folder: Path) -> None:
    folder.mkdir()
    tool = "import verl\n\n\n@verl.tool\ndef price(fruit: str) -> str:\n    'Return a price.'\n    return '7'\n"
    (folder / "good.py").write_text(tool)
    (folder / "none.py").write_text("def price(fruit):\n    return '7'\n")
    (folder / "raises.py").write_text("raise KeyError('x')\n")
    (folder / "broken.yaml").write_text("tool: []\n")
