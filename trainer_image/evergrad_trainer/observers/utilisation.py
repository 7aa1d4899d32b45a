"""How much of what the devices can do a step has used. Pure."""

import math

from evergrad_trainer.base.records import RunInfo, StepRecord


def flops_per_second(info: RunInfo, record: StepRecord) -> float | None:
    """Floating-point operations of the model a second, over all processes; None where they are not known, and
    for a step that trained nothing."""
    seconds = record.step_seconds
    if info.flops_per_step is None or not record.tokens:
        return None
    return info.flops_per_step / seconds if 0 < seconds < math.inf else None


def utilisation(info: RunInfo, record: StepRecord) -> float | None:
    """The same as a share of what the devices of all processes can do at best (MFU).

    Evaluations and saves are between steps, and are not counted as time.
    """
    speed = flops_per_second(info, record)
    if speed is None or info.peak_flops is None or record.world_size < 1:
        return None
    return speed / (info.peak_flops * record.world_size)
