import pytest
import torch

from verl.training.fsdp.settings import FsdpSettings
from verl.training.fsdp.sharding import _precision

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("param", ["float32", "bfloat16"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_gradients_are_reduced_in_float32_whatever_the_dtypes(param, compute):
    policy = _precision(FsdpSettings("model", param_dtype=param, compute_dtype=compute))
    assert policy.reduce_dtype == torch.float32
    assert policy.param_dtype == (None if param == compute else getattr(torch, compute))
