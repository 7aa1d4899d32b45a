"""The settings of one node: its place in a run, and the addresses and paths that it needs."""

from dataclasses import dataclass, field
from pathlib import Path

from evergrad_coordinator.protocol import Recovery


@dataclass(frozen=True)
class NodeSettings:
    """Identity of one node, and its place in the run.

    ``address``: address at which other nodes reach this node. ``grace_seconds``: time from SIGTERM until the
    node leaves without a plan. ``shares_host``: other nodes use the same ports. ``is_only_node``: the command
    runs only this node, so rank 0 prints directly to the command's output.
    """

    run: str
    node: str
    coordinator_host: str
    coordinator_port: int
    address: str
    recovery: Recovery
    run_directory: Path
    token: str = ""
    fingerprint: dict[str, str] = field(default_factory=dict)
    grace_seconds: float = 25.0
    termination_log: Path | None = None
    forwards_output: bool = True
    shares_host: bool = False
    is_only_node: bool = False
