"""The whole TrainingRun: the envelope Kubernetes users know around ``spec.training``."""

from typing import Any, Literal

from pydantic import Field

from evergrad_trainer.config.base import Section
from evergrad_trainer.config.numbers import Count
from evergrad_trainer.config.training import Training


class Metadata(Section):
    name: str = Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
    """Name of the run: lower-case letters, digits and dashes."""
    namespace: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class Nodes(Section):
    min: Count = Field(default=1, ge=1, le=1024)
    """The run goes on with whatever is left down to this many nodes."""
    max: Count | None = Field(default=None, ge=1, le=1024)
    """Uses up to this many nodes; default: min."""


class Resources(Section):
    requests: dict[str, str | int | float] = Field(default_factory=dict)
    limits: dict[str, str | int | float] = Field(default_factory=dict)


class Storage(Section):
    size: str | None = None
    """Size of the volume, a Kubernetes quantity."""
    storage_class_name: str | None = None
    claim_name: str | None = None
    """An existing PVC instead of a new one."""


class FailurePolicy(Section):
    max_failures_without_progress: Count = Field(default=3, ge=1)
    """Failures of the user's making in a row, without a newer checkpoint, after which the run fails."""


class Spec(Section):
    nodes: Nodes = Nodes()
    workers_per_node: Count | None = Field(default=None, ge=1, le=64)
    """Training processes a node; default: its accelerators, else 1."""
    resources: Resources = Resources()
    storage: Storage = Storage()
    template: dict[str, Any] = Field(default_factory=dict)
    """The allowed part of a pod template; has no meaning for ``evergrad run``."""
    suspend: bool = False
    failure_policy: FailurePolicy = FailurePolicy()
    training: Training


class TrainingRun(Section):
    api_version: Literal["evergrad.dev/v1alpha1"]
    kind: Literal["TrainingRun"]
    metadata: Metadata
    spec: Spec
