"""The whole TrainingRun and its rules: the envelope of a Kubernetes object around ``spec.training`` or
``spec.script``. The rules of each section are in the section's file."""

import json
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from pydantic import ConfigDict, Field

from evergrad_coordinator.protocol import Recovery
from evergrad_manifest.envelope.other_pods import RULES as RULES_OF_PODS_BESIDE
from evergrad_manifest.envelope.other_pods import CheckpointEvaluation, Preparation
from evergrad_manifest.envelope.resources import RULES as RULES_OF_RESOURCES
from evergrad_manifest.envelope.resources import Resources
from evergrad_manifest.envelope.script import RULES as RULES_OF_SCRIPT
from evergrad_manifest.envelope.script import Script
from evergrad_manifest.envelope.storage import RULES as RULES_OF_STORAGE
from evergrad_manifest.envelope.storage import Storage
from evergrad_manifest.envelope.template import RULES as RULES_OF_TEMPLATE
from evergrad_manifest.envelope.template import Template
from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_manifest.model.base import Section, Switch
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.view import UNKNOWN, View
from evergrad_manifest.training import Training
from evergrad_manifest.training.steps import divisors_of, slots_of
from evergrad_manifest.values.images import IMAGE_REMEDY, IMAGE_RULE, is_image
from evergrad_manifest.values.numbers import Whole, show
from evergrad_manifest.values.quantities import (
    DNS_LABEL,
    LONGEST_LABEL,
    LONGEST_RUN_NAME,
    RUN_NAME,
    fault_of_key,
    fault_of_label_value,
)

KINDS: Final = ("training", "script")
"""Kinds of runs. A ``spec`` has exactly one of them."""
LONGEST_SECONDS: Final = 2**31 - 1
"""Largest number of seconds that Kubernetes' own fields of this kind can hold."""
MAX_SPEC_BYTES: Final = 700_000
"""Largest size of a run's ``spec`` as JSON, which leaves room in the ConfigMap for its other texts."""
MOST_ANNOTATION_BYTES: Final = 256 * 1024
"""Most bytes of annotations on one object, as Kubernetes' TotalAnnotationSizeLimitB."""

_MIN, _MAX = "spec.nodes.min", "spec.nodes.max"


_DOMAIN_PATH: Final = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/.+$"


class Metadata(Section):
    """The part of Kubernetes' object metadata that a file sets."""

    name: str = Field(min_length=1, max_length=LONGEST_RUN_NAME, pattern=RUN_NAME)
    """Name of the run. It has at most 45 lower-case letters, digits and dashes, and starts with a letter. The
    objects of the run are named after it."""
    namespace: str | None = Field(
        default=None, min_length=1, max_length=LONGEST_LABEL, pattern=DNS_LABEL
    )
    """Kubernetes namespace. Used only on a cluster."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the object. They do not change how the run trains."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the object. They do not change how the run trains."""


def check_annotations(view: View) -> Iterator[Problem]:
    """Check that the annotations of the run, and of its pods, fit into an object."""
    for where in ("metadata", "spec.template"):
        values = view.raw(*where.split("."), "annotations")
        size = sum(
            len(f"{key}{value}".encode(errors="replace"))
            for key, value in (values.items() if isinstance(values, Mapping) else ())
        )
        if size > MOST_ANNOTATION_BYTES:
            why = (
                f"an API server keeps at most {MOST_ANNOTATION_BYTES} bytes of annotations, keys and "
                "values together"
            )
            what = f"{size} bytes are too many"
            yield Problem(f"{where}.annotations", what, why, "Shorten them")


def check_labels(view: View) -> Iterator[Problem]:
    """Check keys and values of labels and annotations, of the object and of selectors of a pod's host."""
    # Read the file itself, so that a label with a wrong value does not hide problems of other labels.
    for where in ("metadata", "spec.template", "spec.preparation", "spec.evaluation"):
        # The value of an annotation is any text. Only labels and label selectors have a format.
        for kind in (
            "labels",
            "annotations",
            *(("nodeSelector",) if where != "metadata" else ()),
        ):
            values = view.raw(*where.split("."), kind)
            for key, value in values.items() if isinstance(values, Mapping) else ():
                path = format_path((*where.split("."), kind, key))
                if (fault := fault_of_key(key)) is not None:
                    yield Problem(path, *fault, "Rename it")
                if (
                    kind != "annotations"
                    and isinstance(value, str)
                    and (fault := fault_of_label_value(value)) is not None
                ):
                    yield Problem(path, *fault, "Correct it")


class Nodes(Section):
    """How many machines share the run."""

    min: Whole = Field(default=1, ge=1, le=1024)
    """Minimum number of nodes that train. A run starts with ``max`` nodes, or after 30 s with at least
    ``min``."""
    max: Whole | None = Field(default=None, ge=1, le=1024)
    """Maximum number of nodes that train. Default: ``min``."""

    @property
    def largest(self) -> int:
        """The number of nodes that the run uses if they are available."""
        return self.min if self.max is None else self.max


def check_nodes(view: View) -> Iterator[Problem]:
    """Check that max is at least min, and that every process has a slot of the step."""
    if (found := view.known(_MIN, _MAX)) is None:
        return
    smallest, largest = found
    if largest is not None and largest < smallest:
        remedy = f"Raise max to at least {smallest}, or lower min"
        yield Problem(_MAX, f"{largest} is below nodes.min {smallest}", "", remedy)
        return

    # A process without a slot would compute nothing in any step, so check the largest group.
    path, nodes = (_MIN, smallest) if largest is None else (_MAX, largest)
    workers, slots = view.get("spec.workersPerNode"), slots_of(view)
    if workers is UNKNOWN or slots is None:
        return
    # Without workersPerNode, a node has as many workers as accelerators, and at least one.
    per_node = workers or 1
    most, whole, micro = slots
    processes = nodes * per_node
    if processes <= most:
        return
    given = f"{nodes} nodes with {per_node} workersPerNode" if workers else f"{nodes} nodes"
    what = (
        f"{given} make W = {processes} processes, more than the M = {most} slots of a step"
    )
    why = f"globalBatchSize {whole} / microBatchSize {micro} = {most}, and each process needs its own slot"

    # Find numbers that give every process a slot. A micro-batch has to divide the global batch, so offer only
    # divisors.
    fitting = [divisor for divisor in divisors_of(whole) if whole // divisor >= processes]
    remedies = []
    if most >= per_node:
        remedies.append(f"lower {path.removeprefix('spec.')} to {most // per_node}")
    if workers is not None and workers > 1 and most >= nodes:
        remedies.append(f"lower workersPerNode to {most // nodes}")
    if fitting:
        remedies.append(f"lower microBatchSize to {max(fitting)}")
    remedies.append("raise globalBatchSize")
    remedy = ", or ".join(remedies)
    yield Problem(path, what, why, f"W is at most {most}: {remedy}")


class FailurePolicy(Section):
    """When a failing run is given up. Preemption, eviction and lost nodes never count."""

    max_failures_without_progress: Whole = Field(default=3, ge=1, le=1000)
    """Number of failures in a row without progress that are tolerated; one more ends the run. Lost and
    leaving nodes never count. Progress is a newer step, or a newer checkpoint if workers start from a
    checkpoint. For a script that reports neither, progress is a lifetime of 10 minutes."""


class Spec(Section):
    """Program of the run, and where it runs."""

    # The JSON schema is for editors, which cannot run our rules. A kind that is null counts as absent, as it
    # does here.
    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": [kind], "properties": {kind: {"type": "object"}}}
                for kind in KINDS
            ]
        }
    )

    profile: str | None = Field(
        default=None, min_length=1, max_length=LONGEST_LABEL, pattern=DNS_LABEL
    )
    """Name of the profile of the installation that sets values which the file leaves out. Default:
    ``default``. Used only on a cluster."""
    nodes: Nodes = Nodes()
    """Number of nodes that share the run."""
    workers_per_node: Whole | None = Field(default=None, ge=1, le=64)
    """Number of training processes on each node. Default: the number of its accelerators, or 1 without
    accelerators."""
    resources: Resources = Resources()
    """Resources of each node's pod. Used only on a cluster."""
    storage: Storage = Storage()
    """Volume that holds the run directory. ``evergrad run`` uses ``runs/<name>`` instead."""
    template: Template = Template()
    """Allowed part of a pod template. Used only on a cluster."""
    image: str | None = Field(default=None, min_length=1, max_length=1024)
    """Image of the training pods. Default: the operator's image, which the run keeps until its end. Used only
    on a cluster."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When a node pulls the image. Default: the setting of the operator."""
    managed_by: str | None = Field(default=None, max_length=63, pattern=_DOMAIN_PATH)
    """Controller that manages the run, as in a Job. Default: ``evergrad.dev/operator``. Evergrad's operator
    ignores runs of other controllers."""
    suspend: Switch = False
    """If true, the run saves its state, stops and releases its nodes. If you set it to false again, the run
    continues at the same step."""
    restart_nonce: str | None = Field(default=None, min_length=1, max_length=64)
    """Any text. A new value replaces all pods, which continue from the saved state. A failed run starts again
    with a full failure budget."""
    active_deadline_seconds: Whole | None = Field(default=None, ge=1, le=LONGEST_SECONDS)
    """Seconds after its start at which an incomplete run fails. Default: no deadline. Used only on a
    cluster."""
    ttl_seconds_after_finished: Whole | None = Field(default=None, ge=0, le=LONGEST_SECONDS)
    """Seconds after the end of the run at which its objects are deleted, except its volume. Default: they
    stay."""
    ttl_deletes: Literal["Children", "Run"] | None = None
    """Objects that ``ttlSecondsAfterFinished`` deletes. ``Children``: the objects of the run. ``Run``: the
    TrainingRun too, if the installation allows it. Default: ``Children``."""
    failure_policy: FailurePolicy = FailurePolicy()
    """When a failing run ends."""
    preparation: Preparation | None = None
    """If set, a separate pod prepares the data before any node starts. Default: the nodes prepare the data.
    Used only on a cluster."""
    evaluation: CheckpointEvaluation | None = None
    """If set, a separate pod evaluates each checkpoint. Default: the run evaluates its sets between steps.
    ``evergrad run`` ignores it."""
    training: Training | None = None
    """The recipe to train. A run has either ``training`` or ``script``."""
    script: Script | None = None
    """Your own command instead of ``training``, for example a script that torchrun can start."""


def check_kind(view: View) -> Iterator[Problem]:
    """Check that a run has either a typed recipe or a script."""
    # A spec that is not a mapping is already one problem. Without this check, both kinds would also be
    # missing.
    if view.get("spec") is UNKNOWN:
        return
    given = [key for key in KINDS if view.is_given(f"spec.{key}")]
    why = "a run is exactly one of them"
    if len(given) == 2:
        yield Problem("spec", "training and script are both set", why, "Remove one of them")
    elif not given:
        remedy = (
            "Add training (the typed recipe), or script with a command such as [train.py]"
        )
        yield Problem("spec", "neither training nor script is set", why, remedy)


def check_image(view: View) -> Iterator[Problem]:
    """Check that the image is a reference that a container runtime can pull."""
    image = view.get("spec.image")
    if isinstance(image, str) and not is_image(image):
        yield Problem(
            "spec.image", f"{show(image)} is not an image", IMAGE_RULE, IMAGE_REMEDY
        )


def check_size(view: View) -> Iterator[Problem]:
    """Check that a run fits into one object of a cluster, and into the ConfigMap from which its nodes read
    it."""
    # Count bytes of UTF-8, as etcd does. Halves of surrogate pairs, which other rules refuse, must not raise
    # an error here.
    spec = view.raw("spec")
    size = len(json.dumps(spec, ensure_ascii=False, default=str).encode(errors="replace"))
    if size > MAX_SPEC_BYTES:
        why = f"a ConfigMap has room for {MAX_SPEC_BYTES} bytes of it"
        yield Problem(
            "spec", f"{size} bytes are too many", why, "Move lists and texts into files"
        )


class TrainingRun(Section):
    """One training run, on this machine or on a cluster."""

    api_version: Literal["evergrad.dev/v1alpha1"]
    """Version of this format."""
    kind: Literal["TrainingRun"]
    """Kind of the object."""
    metadata: Metadata
    """Name and labels."""
    spec: Spec
    """Program of the run, and where it runs."""

    @property
    def training(self) -> Training:
        """The typed recipe. Raises ConfigurationError if the run is a script."""
        if self.spec.training is None:
            raise ConfigurationError(
                _wrong_kind("training", "this run is a script", "a typed run")
            )
        return self.spec.training

    @property
    def script(self) -> Script:
        """The user's own command. Raises ConfigurationError if the run is typed."""
        if self.spec.script is None:
            raise ConfigurationError(
                _wrong_kind("script", "this run has a typed recipe", "the run of a script")
            )
        return self.spec.script

    @property
    def recovery(self) -> Recovery:
        """Whether workers continue after a change of the group. They can only if every rank holds the whole
        state, which is then copied to new ranks."""
        # A shard is lost with its worker, and the state of a script is unknown to us, so both restart from
        # the saved state.
        training = self.spec.training
        return (
            "in-process"
            if training is not None and training.runtime.parallelism == "dataParallel"
            else "fresh"
        )


def _wrong_kind(key: str, why: str, needed: str) -> Problem:
    return Problem(f"spec.{key}", "is not set", why, f"What was asked for needs {needed}")


RULES: Final = (
    check_size,
    check_nodes,
    *RULES_OF_RESOURCES,
    *RULES_OF_STORAGE,
    check_image,
    check_labels,
    check_annotations,
    *RULES_OF_TEMPLATE,
    *RULES_OF_PODS_BESIDE,
    check_kind,
    *RULES_OF_SCRIPT,
)
"""Rules of every run, typed or script, in the order in which their problems are shown."""
