"""Handles of CUDA memory pass vLLM's own encoder, and come back as torch made them; buffers hold the largest tensor."""

from typing import Any

import msgspec
import pytest
import torch
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from verl.errors import EngineError
from verl.rollout.vllm.ipc_handles import decode_handles, encode_handles
from verl.rollout.vllm.transfer import IpcTransferEngine

pytestmark = pytest.mark.unit

HANDLE: tuple[Any, ...] = (
    *(torch.Tensor, torch.Size([1 << 20]), (1,), 0, torch.storage.TypedStorage, torch.uint8, 0),
    *(b"\x01" * 64, 1 << 20, 512, False, b"\x02" * 64, 3, b"\x04" * 64, True),
)
"""What torch's `reduce_tensor` returns for a packed buffer on a GPU."""


def update(handles: Any) -> dict[str, Any]:
    names = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[512, 1024]], "tensor_sizes": [1 << 20]}
    return names | {"ipc_handles": handles}


def send(info: dict[str, Any]) -> dict[str, Any]:
    """Through vLLM's encoder and decoder, as from its client to its engine process."""
    request = WeightTransferUpdateRequest(update_info=info)
    received: Any = MsgpackDecoder().decode(MsgpackEncoder().encode(request))
    return dict(received["update_info"] if isinstance(received, dict) else received[0])


def test_handles_are_decoded_as_torch_created_them() -> None:
    engine = IpcTransferEngine.__new__(IpcTransferEngine)
    info = engine.parse_update_info(send(update(encode_handles({"GPU-1": HANDLE}))))
    assert info.ipc_handles == {"GPU-1": HANDLE}
    assert info.names == ["w"]


def test_the_encoder_of_vllm_refuses_handles_that_are_not_encoded() -> None:
    with pytest.raises((TypeError, msgspec.ValidationError)):
        send(update({"GPU-1": HANDLE}))


def test_handles_of_other_tensors_are_refused() -> None:
    with pytest.raises(EngineError, match=r"torch\.bfloat16 at position 5"):
        encode_handles({"GPU-1": (*HANDLE[:5], torch.bfloat16, *HANDLE[6:])})
    assert decode_handles(encode_handles({"GPU-1": HANDLE})) == {"GPU-1": HANDLE}
