"""The whole TrainingRun: the envelope Kubernetes users know around ``spec.training`` or ``spec.script``."""

from typing import Any, Final, Literal

from pydantic import ConfigDict, Field

from evergrad_coordinator.protocol import Recovery
from evergrad_manifest.base import Section, Switch
from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_manifest.script import Script
from evergrad_manifest.training import Training
from evergrad_manifest.values.numbers import Whole
from evergrad_manifest.values.quantities import (
    DNS_LABEL,
    LONGEST_LABEL,
    LONGEST_RUN_NAME,
    RUN_NAME,
    Quantity,
)

KINDS: Final = ("training", "script")
"""Kinds of runs: a ``spec`` has exactly one of these."""
LONGEST_SECONDS: Final = 2**31 - 1
"""The longest time Kubernetes' own fields of this kind can hold, in seconds."""


class Metadata(Section):
    """The part of Kubernetes' object metadata that a file sets."""

    name: str = Field(min_length=1, max_length=LONGEST_RUN_NAME, pattern=RUN_NAME)
    """Name of the run: lower-case letters, digits and dashes, a letter first, at most 45: what it makes is
    named after it."""
    namespace: str | None = Field(
        default=None, min_length=1, max_length=LONGEST_LABEL, pattern=DNS_LABEL
    )
    """Kubernetes namespace; has no meaning for ``evergrad run``."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the object; they do not change the run."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the object; they do not change the run."""


class Nodes(Section):
    """How many machines share the run."""

    min: Whole = Field(default=1, ge=1, le=1024)
    """The run starts with this many nodes and goes on with whatever is left down to it."""
    max: Whole | None = Field(default=None, ge=1, le=1024)
    """Uses up to this many nodes; default: min."""

    @property
    def largest(self) -> int:
        """The number of nodes that the run uses where it can."""
        return self.min if self.max is None else self.max


class Resources(Section):
    """Resources of each node's pod, as in a container of Kubernetes."""

    requests: dict[str, Quantity] = Field(default_factory=dict)
    """Reserved amounts: resource name to quantity, such as ``cpu: "2"``."""
    limits: dict[str, Quantity] = Field(default_factory=dict)
    """Limits: resource name to quantity, such as ``memory: 4Gi``."""


class Storage(Section):
    """The volume that holds the run directory.

    Either a new one (``size``) or an existing one (``claimName``).
    """

    size: Quantity | None = None
    """Size of the new volume, a Kubernetes quantity such as ``20Gi``."""
    storage_class_name: str | None = Field(default=None, min_length=1)
    """Storage class of the new volume. Default: the cluster's."""
    access_modes: tuple[Literal["ReadWriteOnce", "ReadWriteMany"], ...] | None = Field(
        default=None, min_length=1, max_length=2
    )
    """Access modes of the new volume. Default: ReadWriteOnce where ``nodes.max`` is 1, else ReadWriteMany.
    All pods of a run whose volume is ReadWriteOnce are placed on one node of the cluster."""
    claim_name: str | None = Field(default=None, min_length=1)
    """An existing PVC instead of a new one."""
    path: str | None = Field(default=None, min_length=1, max_length=255)
    """Folder inside the volume that is the run directory, relative and without ``..``; default: the run's
    name."""


class Template(Section):
    """The allowed part of a pod template, spelled as in Kubernetes; has no meaning for ``evergrad run``."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the pods; the prefix ``evergrad.dev/`` is taken."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the pods."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: tuple[dict[str, Any], ...] = ()
    """Taints of nodes that are tolerated."""
    affinity: dict[str, Any] = Field(default_factory=dict)
    """Affinity to nodes and other pods."""
    topology_spread_constraints: tuple[dict[str, Any], ...] = ()
    """How the pods spread over zones or hosts; a constraint without labelSelector counts the nodes' pods of
    this run."""
    volumes: tuple[dict[str, Any], ...] = ()
    """Volumes besides the run directory's."""
    volume_mounts: tuple[dict[str, Any], ...] = ()
    """Where those volumes are mounted."""
    env: tuple[dict[str, Any], ...] = ()
    """Environment variables of the training processes: ``name`` with ``value`` or ``valueFrom``."""
    priority_class_name: str | None = Field(default=None, min_length=1)
    """Priority class of the pods."""
    runtime_class_name: str | None = Field(default=None, min_length=1)
    """Container runtime of the pods."""
    scheduler_name: str | None = Field(default=None, min_length=1)
    """Scheduler of the pods."""
    image_pull_secrets: tuple[dict[str, Any], ...] = ()
    """Secrets that the image is pulled with: ``name`` each."""
    termination_grace_period_seconds: Whole | None = Field(default=None, ge=10, le=86400)
    """Seconds a pod has to save and leave before it is killed; default: 30, never less than a script's
    gracePeriodSeconds + 5."""


class FailurePolicy(Section):
    """When a failing run is given up. Preemption, eviction and lost nodes never count."""

    max_failures_without_progress: Whole = Field(default=3, ge=1, le=1000)
    """Failures in a row without progress that are tolerated; one more ends the run. Lost and leaving nodes
    never count.

    Progress is a newer step; where workers start afresh a newer checkpoint; of a script that reports neither,
    ten minutes.
    """


class Spec(Section):
    """What should run, and on what."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": [kind], "properties": {kind: {"type": "object"}}} for kind in KINDS
            ]
        }
    )

    nodes: Nodes = Nodes()
    """How many machines share the run."""
    workers_per_node: Whole | None = Field(default=None, ge=1, le=64)
    """Training processes a node; default: its accelerators, else 1."""
    resources: Resources = Resources()
    """Resources of each node's pod; has no meaning for ``evergrad run``."""
    storage: Storage = Storage()
    """The volume that holds the run directory; ``evergrad run`` uses ``runs/<name>`` instead."""
    template: Template = Template()
    """The allowed part of a pod template; has no meaning for ``evergrad run``."""
    image: str | None = Field(default=None, min_length=1, max_length=1024)
    """Image of the training pods; default: the operator's, kept for the whole run.

    No meaning for ``evergrad run``.
    """
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When a node pulls the image; default: the operator's setting. No meaning for ``evergrad run``."""
    suspend: Switch = False
    """Stop with state saved and release the nodes; false goes on."""
    restart_nonce: str | None = Field(default=None, min_length=1, max_length=64)
    """Any text; a new one starts the pods anew from saved state, and a failed run again with
    fresh budgets."""
    active_deadline_seconds: Whole | None = Field(default=None, ge=1, le=LONGEST_SECONDS)
    """Seconds after its start at which a run that is not complete fails; default: no end.

    No meaning for ``evergrad run``.
    """
    ttl_seconds_after_finished: Whole | None = Field(default=None, ge=0, le=LONGEST_SECONDS)
    """Seconds after the end until what the run made is deleted, but never its volume; default: it stays."""
    failure_policy: FailurePolicy = FailurePolicy()
    """When a failing run is given up."""
    training: Training | None = None
    """The typed recipe. A run has either this or script."""
    script: Script | None = None
    """A command of your own instead of training: whatever torchrun could start."""


class TrainingRun(Section):
    """One training run, on this machine or on a cluster."""

    api_version: Literal["evergrad.dev/v1alpha1"]
    """Version of this format."""
    kind: Literal["TrainingRun"]
    """Kind of the object."""
    metadata: Metadata
    """Name and labels."""
    spec: Spec
    """What should run, and on what."""

    @property
    def training(self) -> Training:
        """The typed recipe. Raises ConfigurationError for the run of a script."""
        if self.spec.training is None:
            raise ConfigurationError(
                _wrong_kind("training", "this run is a script", "a typed run")
            )
        return self.spec.training

    @property
    def script(self) -> Script:
        """The user's own command. Raises ConfigurationError for a typed run."""
        if self.spec.script is None:
            raise ConfigurationError(
                _wrong_kind("script", "this run has a typed recipe", "the run of a script")
            )
        return self.spec.script

    @property
    def recovery(self) -> Recovery:
        """Whether workers outlive a change of the group: only state that every rank holds whole can be handed
        on."""
        training = self.spec.training
        return (
            "in-process"
            if training is not None and training.runtime.parallelism == "dataParallel"
            else "fresh"
        )


def _wrong_kind(key: str, why: str, needed: str) -> Problem:
    return Problem(f"spec.{key}", "is not set", why, f"What was asked for needs {needed}")
