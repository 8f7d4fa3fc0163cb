"""Settings of every test run. The environment comes first: torch, transformers and triton read it once."""

import os
from pathlib import Path

import pytest

TEST_GPU = "RHOTRAIN_TEST_GPU"
NVIDIA_NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version")


def expects_gpu() -> bool:
    """True where kernels run on a GPU: RHOTRAIN_TEST_GPU says so (1, 0) or, if unset, an NVIDIA device node exists."""
    choice = os.environ.get(TEST_GPU)
    return choice == "1" if choice else any(Path(node).exists() for node in NVIDIA_NODES)


# Without a GPU every Triton kernel runs in the interpreter. The variable counts when a kernel is decorated, and a
# transformers model imports triton already; asking torch whether there is a GPU would import too much too early.
if not expects_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A test never waits for a hub. A test that fetches says so itself (and is marked slow).
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked cuda skip themselves without a GPU; under RHOTRAIN_TEST_GPU=1 a missing GPU is an error instead."""
    cuda_items = [item for item in items if item.get_closest_marker("cuda")]
    if not cuda_items:
        return
    import torch

    if torch.cuda.is_available():
        if os.environ.get("TRITON_INTERPRET") != "1":
            return
        reason = "TRITON_INTERPRET=1: kernels run in the interpreter, not on the GPU"
    else:
        reason = "needs an NVIDIA GPU (make test-gpu)"
    if os.environ.get(TEST_GPU) == "1":
        raise pytest.UsageError(f"{TEST_GPU}=1, but these tests cannot run on a GPU: {reason}")
    for item in cuda_items:
        item.add_marker(pytest.mark.skip(reason=reason))
