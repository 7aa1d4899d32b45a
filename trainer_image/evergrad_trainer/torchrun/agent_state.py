"""State that a torchrun agent's thread shares with the thread of its connection.

Both threads hold ``changed`` while they read or write the state. The connection's thread notifies after each
change. The agent's thread waits for changes in a rendezvous or at its end, always with a time limit. The
connection's thread never waits for the agent's thread.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path

from evergrad_coordinator.protocol import End, Go, Placement, Plan
from evergrad_trainer.torchrun.agent_workers import SeenEnd
from evergrad_trainer.worker.sockets import address_towards


@dataclass(frozen=True)
class AgentSettings:
    """Settings of a node that joins. ``lease_seconds``: used until the coordinator has sent its own value.

    ``join_seconds``: how long a rendezvous waits for a coordinator that does not respond.
    """

    run: str
    node: str
    host: str
    port: int
    address: str | None
    token_file: Path
    lease_seconds: float
    fingerprint: dict[str, str]
    join_seconds: float = 900.0

    def find_address(self) -> str:
        """Return the address at which other nodes reach this node. Raises OSError if it cannot be
        determined."""
        return self.address or address_towards(self.host, self.port)


@dataclass
class AgentState:
    """The agent's position in the run: the generations that it has received, answered and reported."""

    lease_seconds: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    newest: int = 0
    """Newest generation that the coordinator has announced."""
    place: Placement | None = None
    """Place in the running generation; None while the agent is in no group."""
    plan: Plan | None = None
    """The newest plan, until the ``go`` message for it arrives."""
    go: Go | None = None
    end: End | None = None
    is_leaving: bool = False
    """Whether the agent was requested to end."""
    is_out: bool = False
    """Whether the agent is at its end and has no workers any more."""
    is_stopping_workers: bool = False
    done_generation: int = 0
    up_generation: int = 0
    broken_generation: int = 0
    answered_generation: int = 0
    first_end: SeenEnd | None = None
    """End of the running generation's first worker that failed."""
