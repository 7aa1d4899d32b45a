"""Raw TrainingRun, as the API server has validated it → frozen dataclasses. Pure; a typed recipe stays opaque."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from types import MappingProxyType
from typing import Any, Final

from evergrad_coordinator.protocol import Recovery
from evergrad_operator.errors import SpecError
from evergrad_operator.times import parse_time

_UNITS: Final = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_LONGEST_NUMBER = 64


@dataclass(frozen=True)
class Nodes:
    """How many pods train. ``max`` is at least ``min``."""

    min: int
    max: int


@dataclass(frozen=True)
class Resources:
    """A container's resources: name → Kubernetes quantity."""

    requests: Mapping[str, str]
    limits: Mapping[str, str]


@dataclass(frozen=True)
class Storage:
    """The run directory's volume: a new one of ``size``, or the existing ``claim_name``; neither lets the operator choose.

    ``path``: the run directory inside it; None is the run's name.
    """

    size: str | None
    storage_class_name: str | None
    access_modes: tuple[str, ...]
    """Empty: those of the installation."""
    claim_name: str | None
    path: str | None


@dataclass(frozen=True)
class Template:
    """The allowed part of a pod template. Its items keep Kubernetes' spelling."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    node_selector: Mapping[str, str]
    tolerations: tuple[Mapping[str, Any], ...]
    affinity: Mapping[str, Any]
    topology_spread_constraints: tuple[Mapping[str, Any], ...]
    volumes: tuple[Mapping[str, Any], ...]
    volume_mounts: tuple[Mapping[str, Any], ...]
    env: tuple[Mapping[str, Any], ...]
    priority_class_name: str | None
    runtime_class_name: str | None
    scheduler_name: str | None
    image_pull_secrets: tuple[Mapping[str, Any], ...]
    termination_grace_period_seconds: int | None


@dataclass(frozen=True)
class FailurePolicy:
    """Budgets. Failures of the user's making count in a row without progress between them."""

    max_failures_without_progress: int


@dataclass(frozen=True)
class Metrics:
    """A script's Prometheus endpoint: none without a ``port``; 0 is any free one."""

    port: int | None
    linger_seconds: int


@dataclass(frozen=True)
class Script:
    """A command of the user's own, as it would follow torchrun, started once a worker."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    working_directory: str
    grace_period_seconds: int
    metrics: Metrics


@dataclass(frozen=True)
class RunSpec:
    """``spec``, with exactly one of ``training``, which is the trainer's alone, and ``script``; the other is None.

    ``workers_per_node`` is None where the accelerators decide, ``image`` and ``image_pull_policy`` where the operator does.
    Seconds are None for no limit.
    """

    nodes: Nodes
    workers_per_node: int | None
    resources: Resources
    storage: Storage
    template: Template
    image: str | None
    image_pull_policy: str | None
    suspend: bool
    restart_nonce: str | None
    active_deadline_seconds: int | None
    ttl_seconds_after_finished: int | None
    failure_policy: FailurePolicy
    training: Mapping[str, Any] | None = field(repr=False)
    script: Script | None


@dataclass(frozen=True)
class TrainingRun:
    """One TrainingRun. ``uid``, ``generation`` and ``created_at`` are empty and 0 for an object that no API server has seen.

    ``created_at``: seconds since 1970.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: RunSpec
    created_at: float = 0.0
    is_deleting: bool = False

    @property
    def claim_name(self) -> str:
        """The PVC that holds the run directory."""
        return self.spec.storage.claim_name or self.name

    @property
    def volume_path(self) -> str:
        """The run directory inside the PVC, without needless parts."""
        path = self.spec.storage.path or self.name
        return "/".join(part for part in path.split("/") if part not in ("", "."))

    @property
    def recovery(self) -> Recovery:
        """Whether workers outlive a change of the group: only state that every rank holds whole can be handed on."""
        if self.spec.training is None:
            return "fresh"
        runtime = self.spec.training.get("runtime")
        parallelism = runtime.get("parallelism") if isinstance(runtime, Mapping) else None
        return "in-process" if parallelism in (None, "dataParallel") else "fresh"


def parse_run(raw: Mapping[str, Any]) -> TrainingRun:
    """The run in ``raw``, defaults filled in. Raises SpecError where the schema does not hold; never checks it in full."""
    metadata = _mapping(raw, "metadata", "")
    return TrainingRun(
        name=_required_text(metadata, "name", "metadata."),
        namespace=_text(metadata, "namespace", "metadata.") or "default",
        uid=_text(metadata, "uid", "metadata.") or "",
        generation=_count(metadata, "generation", "metadata.") or 0,
        labels=_texts(metadata, "labels", "metadata."),
        annotations=_texts(metadata, "annotations", "metadata."),
        spec=parse_spec(_mapping(raw, "spec", "")),
        created_at=parse_time(metadata.get("creationTimestamp")) or 0.0,
        is_deleting=metadata.get("deletionTimestamp") is not None,
    )


def parse_spec(raw: Mapping[str, Any]) -> RunSpec:
    """``spec`` of a run. Raises SpecError."""
    kinds = [key for key in ("training", "script") if raw.get(key) is not None]
    if len(kinds) != 1:
        raise SpecError(
            "spec", "has both training and script" if kinds else "has neither training nor script"
        )
    (kind,) = kinds
    content = _mapping(raw, kind, "spec.")
    return RunSpec(
        nodes=_parse_nodes(_mapping(raw, "nodes", "spec.")),
        workers_per_node=_count(raw, "workersPerNode", "spec."),
        resources=_parse_resources(_mapping(raw, "resources", "spec.")),
        storage=_parse_storage(_mapping(raw, "storage", "spec.")),
        template=_parse_template(_mapping(raw, "template", "spec.")),
        image=_text(raw, "image", "spec."),
        image_pull_policy=_text(raw, "imagePullPolicy", "spec."),
        suspend=_switch(raw, "suspend", "spec."),
        restart_nonce=_text(raw, "restartNonce", "spec."),
        active_deadline_seconds=_count(raw, "activeDeadlineSeconds", "spec."),
        ttl_seconds_after_finished=_count(raw, "ttlSecondsAfterFinished", "spec."),
        failure_policy=_parse_failure_policy(_mapping(raw, "failurePolicy", "spec.")),
        training=content if kind == "training" else None,
        script=_parse_script(content) if kind == "script" else None,
    )


def _parse_nodes(raw: Mapping[str, Any]) -> Nodes:
    smallest = _count(raw, "min", "spec.nodes.")
    smallest = 1 if smallest is None else smallest
    largest = _count(raw, "max", "spec.nodes.")
    return Nodes(min=smallest, max=smallest if largest is None else largest)


def _parse_resources(raw: Mapping[str, Any]) -> Resources:
    where = "spec.resources."
    return Resources(requests=_quantities(raw, "requests", where), limits=_quantities(raw, "limits", where))


def _parse_storage(raw: Mapping[str, Any]) -> Storage:
    where = "spec.storage."
    return Storage(
        size=_quantity(raw.get("size"), f"{where}size"),
        storage_class_name=_text(raw, "storageClassName", where),
        access_modes=_words(raw.get("accessModes"), f"{where}accessModes"),
        claim_name=_text(raw, "claimName", where),
        path=_text(raw, "path", where),
    )


def _parse_template(raw: Mapping[str, Any]) -> Template:
    where = "spec.template."
    return Template(
        labels=_texts(raw, "labels", where),
        annotations=_texts(raw, "annotations", where),
        node_selector=_texts(raw, "nodeSelector", where),
        tolerations=_mappings(raw, "tolerations", where),
        affinity=_mapping(raw, "affinity", where),
        topology_spread_constraints=_mappings(raw, "topologySpreadConstraints", where),
        volumes=_mappings(raw, "volumes", where),
        volume_mounts=_mappings(raw, "volumeMounts", where),
        env=_mappings(raw, "env", where),
        priority_class_name=_text(raw, "priorityClassName", where),
        runtime_class_name=_text(raw, "runtimeClassName", where),
        scheduler_name=_text(raw, "schedulerName", where),
        image_pull_secrets=_mappings(raw, "imagePullSecrets", where),
        termination_grace_period_seconds=_count(raw, "terminationGracePeriodSeconds", where),
    )


def _parse_failure_policy(raw: Mapping[str, Any]) -> FailurePolicy:
    most = _count(raw, "maxFailuresWithoutProgress", "spec.failurePolicy.")
    return FailurePolicy(max_failures_without_progress=3 if most is None else most)


def _parse_script(raw: Mapping[str, Any]) -> Script:
    where = "spec.script."
    command, grace = _words(raw.get("command"), f"{where}command"), _count(raw, "gracePeriodSeconds", where)
    if not command:
        raise SpecError(f"{where}command", "is not a list of texts")
    return Script(
        command=command,
        env=_texts(raw, "env", where),
        working_directory=_text(raw, "workingDirectory", where) or ".",
        grace_period_seconds=30 if grace is None else grace,
        metrics=_parse_metrics(_mapping(raw, "metrics", where)),
    )


def _parse_metrics(raw: Mapping[str, Any]) -> Metrics:
    where = "spec.script.metrics."
    return Metrics(port=_count(raw, "port", where), linger_seconds=_count(raw, "lingerSeconds", where) or 0)


def _mapping(raw: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = raw.get(key)
    if value is None:
        return _NOTHING
    if not isinstance(value, Mapping):
        raise SpecError(f"{where}{key}", "is not a mapping")
    return value


def _mappings(raw: Mapping[str, Any], key: str, where: str) -> tuple[Mapping[str, Any], ...]:
    value = raw.get(key)
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(item, Mapping) for item in value):
        raise SpecError(f"{where}{key}", "is not a list of mappings")
    return tuple(value)


def _words(value: Any, path: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise SpecError(path, "is not a list of texts")
    return tuple(value)


def _texts(raw: Mapping[str, Any], key: str, where: str) -> Mapping[str, str]:
    value = _mapping(raw, key, where)
    for name, text in value.items():
        if not isinstance(text, str):
            raise SpecError(f"{where}{key}.{name}", "is not a text")
    return value


def _text(raw: Mapping[str, Any], key: str, where: str) -> str | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, str):
        raise SpecError(f"{where}{key}", "is not a text")
    return value


def _required_text(raw: Mapping[str, Any], key: str, where: str) -> str:
    value = _text(raw, key, where)
    if not value:
        raise SpecError(f"{where}{key}", "is missing")
    return value


def _switch(raw: Mapping[str, Any], key: str, where: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise SpecError(f"{where}{key}", "is neither true nor false")
    return bool(value)


def _quantities(raw: Mapping[str, Any], key: str, where: str) -> Mapping[str, str]:
    value = _mapping(raw, key, where)
    found = {name: _quantity(quantity, f"{where}{key}.{name}") for name, quantity in value.items()}
    return {name: quantity for name, quantity in found.items() if quantity is not None}


def _quantity(value: Any, path: str) -> str | None:
    """A quantity as text. YAML makes a number of ``cpu: 2``."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(path, "is not a quantity")
    return repr(value)


def _count(raw: Mapping[str, Any], key: str, where: str) -> int | None:
    return parse_count(raw.get(key), f"{where}{key}")


def parse_count(value: Any, path: str) -> int | None:
    """A whole number; a person may have written it as text with a unit, as everywhere in a manifest. Raises SpecError."""
    if value is None:
        return None
    number = None if isinstance(value, bool) else _decimal(value)
    if number is None or number != number.to_integral_value():
        raise SpecError(path, "is not a whole number")
    return int(number)


def _decimal(value: Any) -> Decimal | None:
    text = value.strip().replace("_", "") if isinstance(value, str) else repr(value)
    unit = _UNITS.get(text[-1:], 1)
    digits = text[:-1].rstrip() if text[-1:] in _UNITS else text
    try:
        number = Decimal(digits) if len(digits) <= _LONGEST_NUMBER else None
    except InvalidOperation:
        return None
    # Beyond this nothing is a number of nodes, and to_integral_value would need the room.
    return (
        number * unit if number is not None and number.is_finite() and abs(number.adjusted()) <= 18 else None
    )
