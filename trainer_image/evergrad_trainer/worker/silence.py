"""Messages of a process that waits for its run's coordinator. Pure."""

SAY_SECONDS = 10.0
"""Interval between two messages."""


def describe_silence(address: str, *, seconds: float, was_there: bool) -> str:
    """Return the message. ``seconds``: time since the last response. ``was_there``: whether there ever was
    one."""
    how = "has not answered for" if was_there else "has never answered, in"
    return (
        f"the coordinator at {address} {how} {seconds:.0f} s; still trying. Check that it runs, "
        "that this is its address, "
        "and that no firewall or network policy is between"
    )
