"""Calculates how much of the devices' performance a step has used. Pure."""

import math

from evergrad_trainer.base.records import RunInfo, StepRecord


def flops_per_second(info: RunInfo, record: StepRecord) -> float | None:
    """Return the model's floating-point operations per second, over all processes.

    Returns None if they are not known, or if the step trained nothing.
    """
    seconds = record.step_seconds
    if info.flops_per_step is None or not record.tokens:
        return None
    return info.flops_per_step / seconds if 0 < seconds < math.inf else None


def utilisation(info: RunInfo, record: StepRecord) -> float | None:
    """Return the same as a share of the peak performance of all processes' devices (MFU).

    Time for evaluations and saves is between steps, and is not counted.
    """
    speed = flops_per_second(info, record)
    if speed is None or info.peak_flops is None or record.world_size < 1:
        return None
    return speed / (info.peak_flops * record.world_size)
