"""The settings of one node: its place in a run, and the addresses and paths that it needs."""

from dataclasses import dataclass, field
from pathlib import Path

from evergrad_coordinator.protocol import Recovery


@dataclass(frozen=True)
class NodeSettings:
    """Identity of one node, and where it belongs.

    ``address``: where other nodes reach this one. ``grace_seconds``: from SIGTERM to leaving on its own.
    ``shares_host``: other nodes have the same ports. ``is_only_node``: of a command for one node, whose rank
    0 prints where the command prints.
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
