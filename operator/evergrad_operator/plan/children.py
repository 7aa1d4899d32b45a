"""A decision → the whole set of objects to apply, create and delete."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evergrad_operator.config import Config
from evergrad_operator.observe import Observation
from evergrad_operator.policies.decision import Bounds, Decision

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Deletion:
    """One object to delete. ``uid``: a precondition, empty for none. ``grace_seconds``: None leaves it to the object."""

    kind: str
    name: str
    uid: str = ""
    grace_seconds: int | None = None


@dataclass(frozen=True)
class Plan:
    """What to do, in the order of the fields.

    ``claim``: to apply, by ``claim_manager``. ``apply``: whole objects to apply, by the operator's own manager. ``bounds``: for
    the coordinator. ``create``: pods to POST; that one exists already means to observe again.
    """

    claim: Object | None = None
    claim_manager: str = ""
    apply: tuple[Object, ...] = ()
    bounds: Bounds | None = None
    delete: tuple[Deletion, ...] = ()
    create: tuple[Object, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be done."""
        return not (self.claim or self.apply or self.bounds or self.delete or self.create)


def plan_children(observation: Observation, decision: Decision, config: Config) -> Plan:
    """Everything that is to be applied, deleted and created for the decision; nothing that already is as it should be."""
    raise NotImplementedError
