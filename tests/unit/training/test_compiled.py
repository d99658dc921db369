import pytest
import torch

from verl.training.kernels.compilation import Compiler
from verl.training.kernels.logprobs import LastLayer, compiled_kernels, token_logprobs

pytestmark = pytest.mark.unit


def failing(monkeypatch, error):
    """Make torch.compile fail; return the list of attempts."""
    tries = []

    def compile(function, **options):
        def run(*args, **kwargs):
            tries.append(function)
            raise error

        return run

    monkeypatch.setattr(torch, "compile", compile)
    return tries


ERRORS = [
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
    OSError("cuda.h: no such file"),
    FileNotFoundError(2, "g++"),
    ImportError("libcuda.so.1: cannot open shared object file"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_compiler_that_fails_is_tried_once_and_the_plain_function_runs(monkeypatch, error):
    tries = failing(monkeypatch, error)
    compiler = Compiler()
    double, triple = (compiler.compile(lambda x, factor=factor: factor * x) for factor in (2, 3))
    assert [double(3), double(4), triple(5)] == [6, 8, 15]
    assert len(tries) == 1
    assert compiler.error is not None
    assert compiler.error.startswith(type(error).__name__)


def test_a_lack_of_memory_is_not_a_failure_of_the_compiler(monkeypatch):
    tries = failing(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    compiler = Compiler()
    with pytest.raises(torch.OutOfMemoryError):
        compiler.compile(lambda x: 2 * x)(3)
    assert (len(tries), compiler.error) == (1, None)


def test_the_error_is_one_line(monkeypatch):
    failing(monkeypatch, RuntimeError("\n  backend='inductor' raised:\nCalledProcessError: gcc ...\n" + "x" * 9999))
    compiler = Compiler()
    compiler.compile(lambda x: 2 * x)(1)
    assert compiler.error == "RuntimeError: backend='inductor' raised: CalledProcessError: gcc ..."


def test_an_error_of_the_function_itself_is_raised():
    broken = Compiler().compile(lambda x: x @ x)
    with pytest.raises(RuntimeError, match=r"size|shape|same reduction"):
        broken(torch.ones(2, 3))


def test_kernels_that_cannot_be_compiled_say_why_and_work(monkeypatch):
    failing(monkeypatch, ERRORS[0])
    kernels, error = compiled_kernels(torch.device("cpu"), torch.float32)
    assert error is not None
    assert "Failed to find C compiler" in error
    torch.manual_seed(0)
    layer, targets = LastLayer(torch.randn(5, 8), torch.randn(11, 8)), torch.arange(5)
    assert torch.equal(kernels.forward(layer, targets, 1.0)[0], token_logprobs(layer, targets)[0])
