"""Log-probs and entropies of 4,096 tokens over a vocabulary of 151,936, forward and backward: memory, time, equality.

python tests/acceptance/vocabulary.py [--short]

The plain way (logits, log-softmax, gather) and ours each run in a process of their own. The figure is the peak of
resident memory over what the process held when its inputs were made. `--short` takes an eighth of the tokens.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from verl.training.logprobs import token_logprobs

VOCABULARY, HIDDEN = 151_936, 256
MEMORY_LIMIT, GRADIENT_LIMIT = 1 / 4, 1e-5
MIB = 1 << 20


def plain(hidden, weight, targets):
    log_p = (hidden @ weight.T).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def memory(field):
    """Of this process, in bytes: VmRSS now, VmHWM at its highest."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure(way, tokens, path):
    """In a process of its own: one forward and backward, the gradients left in `path`."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=generator) / HIDDEN**0.5).requires_grad_()
    targets = torch.randint(VOCABULARY, (tokens,), generator=generator)
    upstream = torch.randn(2, tokens, generator=generator)
    before, start = memory("VmRSS"), time.monotonic()
    logprobs, entropy = {"plain": plain, "chunked": token_logprobs}[way](hidden, weight, targets)
    (upstream[0] * logprobs + 0.1 * upstream[1] * entropy).sum().backward()
    seconds, after = time.monotonic() - start, memory("VmHWM")
    torch.save({"hidden": hidden.grad, "weight": weight.grad, "logprobs": logprobs.detach()}, path)
    print(json.dumps({"bytes": after - before, "seconds": seconds}))


def child(way, tokens, path):
    command = [sys.executable, __file__, "--way", way, "--tokens", str(tokens), "--out", str(path)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="an eighth of the tokens")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--way", choices=["plain", "chunked"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tokens = arguments.tokens or (512 if arguments.short else 4096)
    if arguments.way:
        measure(arguments.way, tokens, arguments.out)
        return
    with tempfile.TemporaryDirectory() as name:
        paths = {way: Path(name) / f"{way}.pt" for way in ("chunked", "plain")}
        spent = {way: child(way, tokens, path) for way, path in paths.items()}
        ours, theirs = (torch.load(paths[way]) for way in ("chunked", "plain"))
    gaps = {key: float((ours[key] - theirs[key]).norm() / theirs[key].norm()) for key in ours}
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
