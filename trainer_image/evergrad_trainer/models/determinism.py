"""Settings that make an accelerator compute the same bits again."""

import os

import torch

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
"""Read by cuBLAS with its first handle, so that it must be set before the process begins."""
CUBLAS_DETERMINISTIC = (":4096:8", ":16:8")
"""The values with which cuBLAS adds in the same order each time (its documentation, "Results
reproducibility")."""


def is_cublas_deterministic() -> bool:
    """Whether this process was started with determinism switched on."""
    return os.environ.get(CUBLAS_VARIABLE) in CUBLAS_DETERMINISTIC


def use_deterministic_kernels() -> None:
    """Let torch take deterministic kernels from here on, and raise RuntimeError where it has none."""
    torch.use_deterministic_algorithms(True)
