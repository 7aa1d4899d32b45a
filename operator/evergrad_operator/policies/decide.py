"""The order of the policies: the first that has something to say decides."""

from evergrad_operator.config import Config
from evergrad_operator.decision import Decision
from evergrad_operator.observe import Observation


def decide(observation: Observation, config: Config, now: float) -> Decision:
    """What should be done with the run at ``now``, seconds since 1970. The same arguments give the same decision."""
    raise NotImplementedError
