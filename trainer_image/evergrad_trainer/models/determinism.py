"""Settings for bitwise reproducible results on an accelerator, and their values in this process."""

import os

import torch

from evergrad_manifest.errors import Problem
from evergrad_manifest.training.common import Reproducibility
from evergrad_trainer.base.errors import ModelError

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
"""Variable that cuBLAS reads with its first handle, so it must be set before the process starts."""
CUBLAS_DETERMINISTIC = (":4096:8", ":16:8")
"""Values with which cuBLAS always adds in the same order (see "Results reproducibility" in its
documentation)."""
_NO_KERNEL = "does not have a deterministic implementation"
"""The text after the name of the operation in torch's error (Context.cpp, alertNotDeterministic)."""


def is_cublas_deterministic() -> bool:
    """Whether this process was started with a deterministic cuBLAS setting."""
    return os.environ.get(CUBLAS_VARIABLE) in CUBLAS_DETERMINISTIC


def needs_deterministic_kernels(settings: Reproducibility, *, on_accelerator: bool) -> bool:
    """Whether the manifest requires deterministic kernels: explicitly, or by ``exact`` on an accelerator."""
    return settings.deterministic or (settings.elastic == "exact" and on_accelerator)


def choose_determinism(settings: Reproducibility, device: torch.device) -> None:
    """Set torch's switches for this process.

    With determinism, torch uses only deterministic kernels, and raises RuntimeError if an operation has none.
    cuDNN does not benchmark kernels, because the fastest kernel may differ the next time.
    """
    on_accelerator = device.type == "cuda"
    wanted = needs_deterministic_kernels(settings, on_accelerator=on_accelerator) and (
        # A run that an older version started without the variable continues without determinism; preflight
        # logs a warning.
        not on_accelerator or is_cublas_deterministic()
    )
    # Never switch determinism off, because a custom task may have switched it on.
    if wanted:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def raise_if_not_deterministic(error: Exception) -> None:
    """Raise ModelError if ``error`` reports an operation without a deterministic kernel.

    A retry would fail in the same way.
    """
    text = str(error)
    if isinstance(error, RuntimeError) and _NO_KERNEL in text:
        raise ModelError(
            Problem(
                "spec.training.reproducibility.deterministic",
                f"true is not possible for this model: {text.partition(_NO_KERNEL)[0].strip()} has no "
                "deterministic kernel here",
                "its result would differ from one time to the next",
                "Set it to false, or use a model without this operation",
            )
        ) from error


def describe_determinism() -> dict[str, str]:
    """Return the settings that affect the bits of results in this process, for the run's provenance."""
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
