"""Runs inside SGLang's scheduler processes: the receiving end of the weights.

SGLang imports the function that `custom_weight_loader` names, and calls it for each update with tensors that it has
unpickled. Ours are empty: the name of the only one is a message in JSON, and the bytes are in a file in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.weights.bucket import SharedBucket, TensorSlot, unpack


def write_bucket(bucket: SharedBucket) -> dict[str, Any]:
    """Return the message that makes every scheduler process load a bucket."""
    slots = [(slot.name, slot.dtype, list(slot.shape), slot.offset) for slot in bucket.slots]
    return {"path": bucket.path, "size": bucket.size, "slots": slots}


def load_message(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Do what a message says: load a bucket, or seed the generators that sample.

    SGLang's process would end with an exception, and reports success otherwise: errors go to a folder.
    """
    [(text, _)] = named_tensors
    message = json.loads(text)
    try:
        if "seed" in message:
            torch.manual_seed(message["seed"])
        else:
            _load_bucket(model, message)
    except Exception as error:  # noqa: BLE001 - process boundary: `SglangEngine` raises it
        Path(message["errors"], str(os.getpid())).write_text(f"{type(error).__name__}: {error}")


def _load_bucket(model: torch.nn.Module, message: dict[str, Any]) -> None:
    slots = [TensorSlot(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in message["slots"]]
    data = torch.from_file(message["path"], shared=False, size=message["size"], dtype=torch.uint8)
    data = data.to(next(model.parameters()).device)
    model.load_weights(unpack(slots, data))  # type: ignore[operator]
