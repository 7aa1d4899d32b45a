"""What the operator was told for all runs. Values only; ``settings`` reads them. Pure."""

from dataclasses import dataclass

from evergrad_coordinator.contract import UNDISTURBED_SECONDS


@dataclass(frozen=True)
class Config:
    """Images and switches of the installation. Times in seconds."""

    trainer_image: str
    operator_image: str
    """Also the coordinator's."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    """Names of secrets in the run's namespace."""
    network_policies: bool = True
    disruption_budgets: bool = True
    operator_namespace: str = ""
    """Where the operator runs, whose pods may reach the coordinator's status; empty: from any namespace."""
    cluster_domain: str = ""
    """Appended to the coordinator's name (``svc.cluster.local``); empty: ``svc``, which the pod's search list completes."""
    default_storage_size: str = "10Gi"
    default_storage_class: str | None = None
    storage_access_mode: str = ""
    """Of new volumes whose run names none; empty: ReadWriteOnce for a run of one node, else ReadWriteMany."""
    node_loss_toleration_seconds: int = 5
    """So long a pod may stay on a node that is not ready."""
    coordinator_cpu: str = "20m"
    coordinator_memory: str = "64Mi"
    coordinator_cpu_limit: str = "1"
    """A namespace's quota may ask for limits, which a run can give for its nodes only."""
    coordinator_memory_limit: str = "256Mi"
    shared_memory_size: str = ""
    """Most of /dev/shm; empty: what the pod's memory limit allows."""
    user_id: int = 10001
    group_id: int = 10001
    first_backoff_seconds: float = 2.0
    """Before the second replacement after failures that count; the first waits for nothing, each further one twice as long."""
    longest_backoff_seconds: float = 60.0
    short_life_seconds: float = 20.0
    """A pod that ended sooner was hardly worth its start: after three of these in a row their replacements wait, too."""
    undisturbed_seconds: float = UNDISTURBED_SECONDS
    """Of a run that reports neither steps nor checkpoints: a pod that lived so long has made progress."""
    finish_grace_seconds: float = 60.0
    """For the pods of a complete run to write their report and end."""
    fail_grace_seconds: float = 10.0
    """For the pods of a failed run to end by themselves."""
