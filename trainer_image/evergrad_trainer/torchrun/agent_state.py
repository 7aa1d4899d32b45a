"""State that the thread of a torchrun agent and the thread of its conversation share.

Both threads hold ``changed`` while they read or write any of it. The conversation's thread notifies whenever
something has changed; the agent's thread waits on it, in a rendezvous or at its end, always with a bound. The
conversation's thread never waits for the agent's.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path

from evergrad_coordinator.protocol import End, Go, Placement, Plan
from evergrad_trainer.torchrun.agent_workers import SeenEnd
from evergrad_trainer.worker.sockets import address_towards


@dataclass(frozen=True)
class AgentSettings:
    """Settings of a node that joins. ``lease_seconds`` holds until the coordinator has sent its own.

    ``join_seconds``: how long a rendezvous waits for a coordinator that does not answer.
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
        """This node's address as the others see it. Raises OSError."""
        return self.address or address_towards(self.host, self.port)


@dataclass
class AgentState:
    """Where an agent is in the run, by the generations it has heard of, answered and told of."""

    lease_seconds: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    newest: int = 0
    """Newest generation that the coordinator has named."""
    place: Placement | None = None
    """Held in a running generation; None while out of every group."""
    plan: Plan | None = None
    """The newest plan, until its ``go``."""
    go: Go | None = None
    end: End | None = None
    is_leaving: bool = False
    """The agent was asked to end."""
    is_out: bool = False
    """The agent is at its end, and has no workers any more."""
    is_stopping_workers: bool = False
    done_generation: int = 0
    up_generation: int = 0
    broken_generation: int = 0
    answered_generation: int = 0
    first_end: SeenEnd | None = None
    """End of the first worker of the running generation that failed."""
