"""Compare chunked log-probs with plain ones on 4,096 tokens and a vocabulary of 151,936: memory, time, gradients.

make show-vocabulary [ARGS=--short]

The plain method (logits, log-softmax, gather) and the chunked one each run forward and backward in a separate process.
The figure is the peak resident memory above what the process holds once its inputs exist. `--short` uses an eighth of
the tokens.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from verl.training.kernels.logprobs import LastLayer, token_logprobs

VOCABULARY, HIDDEN = 151_936, 256
MEMORY_LIMIT, GRADIENT_LIMIT = 1 / 4, 1e-5
MIB = 1 << 20


def plain(hidden, weight, targets):
    log_p = (hidden @ weight.T).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def chunked(hidden, weight, targets):
    return token_logprobs(LastLayer(hidden, weight), targets)


METHODS = {"chunked": chunked, "plain": plain}


def memory(field):
    """Return the memory of this process in bytes: VmRSS is the current, VmHWM the peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure(method, tokens, path, vocabulary=VOCABULARY):
    """Run one forward and backward pass, save the gradients to `path` and return memory and time."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
    weight = (torch.randn(vocabulary, HIDDEN, generator=generator) / HIDDEN**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    upstream = torch.randn(2, tokens, generator=generator)
    before, start = memory("VmRSS"), time.monotonic()
    logprobs, entropy = METHODS[method](hidden, weight, targets)
    (upstream[0] * logprobs + 0.1 * upstream[1] * entropy).sum().backward()
    seconds, after = time.monotonic() - start, memory("VmHWM")
    torch.save({"hidden": hidden.grad, "weight": weight.grad, "logprobs": logprobs.detach()}, path)
    return {"bytes": after - before, "seconds": seconds}


def measure_in_process(method, tokens, path):
    command = [sys.executable, __file__, "--method", method, "--tokens", str(tokens), "--out", str(path)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def relative_differences(chunked, plain):
    return {key: float((chunked[key] - plain[key]).norm() / plain[key].norm()) for key in plain}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="an eighth of the tokens")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tokens = arguments.tokens or (512 if arguments.short else 4096)
    if arguments.method:
        print(json.dumps(measure(arguments.method, tokens, arguments.out)))
        return
    with tempfile.TemporaryDirectory() as name:
        paths = {method: Path(name) / f"{method}.pt" for method in METHODS}
        spent = {method: measure_in_process(method, tokens, path) for method, path in paths.items()}
        gaps = relative_differences(*(torch.load(path) for path in paths.values()))
    ratio = spent["chunked"]["bytes"] / spent["plain"]["bytes"]
    figures = {
        "tokens": tokens,
        "vocabulary": VOCABULARY,
        "plain_mib": round(spent["plain"]["bytes"] / MIB),
        "chunked_mib": round(spent["chunked"]["bytes"] / MIB),
        "memory_ratio": round(ratio, 4),
        "memory_limit": MEMORY_LIMIT,
        "gradient_difference": max(gaps["hidden"], gaps["weight"]),
        "logprob_difference": gaps["logprobs"],
        "gradient_limit": GRADIENT_LIMIT,
        "plain_seconds": round(spent["plain"]["seconds"], 1),
        "chunked_seconds": round(spent["chunked"]["seconds"], 1),
    }
    good = ratio <= MEMORY_LIMIT and max(gaps.values()) <= GRADIENT_LIMIT
    print(json.dumps({"name": "vocabulary", **figures, "pass": good}))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
