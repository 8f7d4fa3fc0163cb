"""Where Triton kernels run in these tests, and what makes the interpreter as strict as a GPU."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rhotrain.kernels.backend import HAS_TRITON, INTERPRETED


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of a test of Triton kernels: the CPU in the interpreter, CUDA where there is a GPU.

    Uninitialised memory holds NaN meanwhile, so that an output nobody wrote is seen. That comes with deterministic
    algorithms, which would also refuse what has none on CUDA, such as the reference's cumsum; it only warns here.
    """
    if not HAS_TRITON:
        pytest.skip("triton is not installed")
    if request.param == "interpreter" and not INTERPRETED:
        pytest.skip("a GPU was found, so kernels are not decorated for the interpreter")
    place = "cpu" if request.param == "interpreter" else "cuda"
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty fills (fill_uninitialized_memory)
    assert bool(torch.empty(3, device=place).isnan().all())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deterministic", UserWarning)
        yield place
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(scope="session", autouse=True)
def bf16_stores_round_to_nearest() -> Iterator[None]:
    """The interpreter truncates float32 to bf16; a GPU rounds to nearest even, and bounds are about half an ulp."""
    if not INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder, original = interpreter.InterpreterBuilder, interpreter.InterpreterBuilder.cast_impl

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            values = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.bfloat16)
            return interpreter.TensorHandle(values.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        return original(self, src, dst_type)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "cast_impl", cast)
        yield
