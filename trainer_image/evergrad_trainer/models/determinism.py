"""Settings that make an accelerator compute the same bits again, and what they are in this process."""

import os

import torch

from evergrad_manifest.errors import Problem
from evergrad_manifest.training.common import Reproducibility
from evergrad_trainer.base.errors import ModelError

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
"""Read by cuBLAS with its first handle, so that it must be set before the process begins."""
CUBLAS_DETERMINISTIC = (":4096:8", ":16:8")
"""The values with which cuBLAS adds in the same order each time (its documentation, "Results
reproducibility")."""
_NO_KERNEL = "does not have a deterministic implementation"
"""torch's words (Context.cpp, alertNotDeterministic) behind the name of the operation."""


def is_cublas_deterministic() -> bool:
    """Whether this process was started with determinism switched on."""
    return os.environ.get(CUBLAS_VARIABLE) in CUBLAS_DETERMINISTIC


def needs_deterministic_kernels(settings: Reproducibility, *, on_accelerator: bool) -> bool:
    """Whether the manifest asks for them: by name, or by ``exact`` where kernels decide the bits."""
    return settings.deterministic or (settings.elastic == "exact" and on_accelerator)


def choose_determinism(settings: Reproducibility, device: torch.device) -> None:
    """Set torch's switches for this process.

    With determinism torch takes deterministic kernels from here on, and raises RuntimeError where it has
    none. cuDNN tries no kernels out, since the quickest of a trial may be another one next time.
    """
    on_accelerator = device.type == "cuda"
    wanted = needs_deterministic_kernels(settings, on_accelerator=on_accelerator) and (
        # A run that began before the variable was needed continues as it began; preflight warns.
        not on_accelerator or is_cublas_deterministic()
    )
    # Switched on, never off: a task of the user's own may have done so itself.
    if wanted:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def raise_if_not_deterministic(error: Exception) -> None:
    """Raise ModelError where ``error`` is torch's about an operation that has no deterministic kernel: no
    retry cures that."""
    text = str(error)
    if isinstance(error, RuntimeError) and _NO_KERNEL in text:
        raise ModelError(
            Problem(
                "spec.training.reproducibility.deterministic",
                f"true cannot be had for this model: {text.partition(_NO_KERNEL)[0].strip()} has no "
                "deterministic kernel here",
                "its result would differ from one time to the next",
                "Set it to false, or use a model without this operation",
            )
        ) from error


def describe_determinism() -> dict[str, str]:
    """Settings that decide the bits in this process, for the run's provenance."""
    cudnn = torch.backends.cudnn
    switches = {
        "deterministicAlgorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnnDeterministic": cudnn.deterministic,
        "cudnnBenchmark": cudnn.benchmark,
    }
    variables = {
        "cublasWorkspace": CUBLAS_VARIABLE,
        "pythonHashSeed": "PYTHONHASHSEED",
    }
    return {
        **{name: "on" if is_on else "off" for name, is_on in switches.items()},
        **{name: os.environ.get(variable, "unset") for name, variable in variables.items()},
    }
