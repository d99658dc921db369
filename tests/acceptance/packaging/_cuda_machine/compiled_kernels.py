"""Compiles Triton kernels for GPUs that this machine does not have, down to their machine code.

Kernels of vLLM that every request of a run uses: temperature, log-probs of sampled tokens and of prompts. verl has no
Triton kernels of its own.
"""

from __future__ import annotations

import json

from pretended_gpus import pretend

ARCHITECTURES = (80, 90, 100)
GPU = "vllm.v1.worker.gpu.sample"
KERNELS = {
    f"{GPU}.gumbel:_temperature_kernel": {
        "logits_ptr": "*fp32",
        "logits_stride": "i32",
        "expanded_idx_mapping_ptr": "*i32",
        "temperature_ptr": "*fp32",
        "vocab_size": "i32",
        "BLOCK_SIZE": 1024,
    },
    f"{GPU}.logprob:_topk_log_softmax_kernel": {
        "output_ptr": "*fp32",
        "logits_ptr": "*fp32",
        "logits_stride": "i32",
        "topk_ids_ptr": "*i64",
        "topk_ids_stride": "i32",
        "topk": "i32",
        "vocab_size": "i32",
        "BLOCK_SIZE": 1024,
        "TOPK_BLOCK_SIZE": 8,
    },
    f"{GPU}.logprob:_ranks_kernel": {
        "output_ptr": "*i64",
        "logits_ptr": "*fp32",
        "logits_stride": "i32",
        "token_ids_ptr": "*i64",
        "vocab_size": "i32",
        "BLOCK_SIZE": 8192,
    },
    f"{GPU}.prompt_logprob:_prompt_logprobs_token_ids_kernel": {
        "prompt_logprobs_token_ids_ptr": "*i64",
        "query_start_loc_ptr": "*i32",
        "idx_mapping_ptr": "*i32",
        "num_computed_tokens_ptr": "*i32",
        "all_token_ids_ptr": "*i32",
        "all_token_ids_stride": "i32",
        "BLOCK_SIZE": 1024,
    },
}
"""Kernel -> its arguments: their types, or the values of constants."""


def main() -> None:
    pretend()
    from pkgutil import resolve_name

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sizes, missing = {}, {}
    for name, arguments in KERNELS.items():
        constants = {key: value for key, value in arguments.items() if isinstance(value, int)}
        signature = {key: "constexpr" if key in constants else value for key, value in arguments.items()}
        for architecture in ARCHITECTURES:
            title = f"{name.rpartition(':')[2]} sm_{architecture}"
            try:
                source = ASTSource(fn=resolve_name(name), signature=signature, constexprs=constants)
                compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
                sizes[title] = len(compiled.asm["cubin"])
            except Exception as error:  # noqa: BLE001 - a compiler fails in many ways
                missing[title] = f"{type(error).__name__}: {error}"[:300]
    missing |= {title: "empty machine code" for title, size in sizes.items() if not size}
    print(json.dumps({"kernels": len(sizes), "missing": missing, "bytes": sizes, "triton": triton.__version__}))


if __name__ == "__main__":
    main()
