"""The operator's configuration for all runs. Values only; ``settings`` reads them. Pure."""

from dataclasses import dataclass

from evergrad_common.contract import UNDISTURBED_SECONDS
from evergrad_operator.core.objects.installation import Installation


@dataclass(frozen=True)
class Config:
    """Images and switches of the installation. Times in seconds."""

    trainer_image: str
    """Image of training pods, if the run names none."""
    operator_image: str
    """Image of the coordinators, which is the operator's own image."""
    image_pull_policy: str = "IfNotPresent"
    """Pull policy of training pods, if the run names none."""
    operator_image_pull_policy: str = "IfNotPresent"
    """Pull policy of the coordinators."""
    image_pull_secrets: tuple[str, ...] = ()
    """Name of a pull secret in each run's namespace."""
    network_policies: bool = True
    """Create a NetworkPolicy for each run."""
    metrics_from: tuple[str, ...] = ()
    """Name of a namespace whose pods can scrape nodes and coordinators. If no namespace is given, all pods
    can scrape nodes, and no pod can scrape coordinators."""
    scrape_annotations: bool = False
    """Annotate nodes and coordinators with prometheus.io/*, for a Prometheus that finds targets by them."""
    disruption_budgets: bool = True
    """Create a PodDisruptionBudget for each run whose group has formed."""
    operator_namespace: str = ""
    """Namespace of the operator, whose pods can reach the coordinators' status. Empty: any namespace."""
    cluster_domain: str = ""
    """Suffix of the coordinator's name (``svc.cluster.local``). Empty: ``svc``, which the pod's search list
    completes."""
    gang: str = "none"
    """Group in which a gang scheduler places the nodes that a run must have: none, coscheduling (a PodGroup
    of scheduler-plugins) or podGroup (Kubernetes' own)."""
    scheduler_name: str = ""
    """Scheduler of nodes, if the run names none. Empty: the cluster's default."""
    profiles: str = ""
    """Profiles of the installation, as a JSON object of profiles by name."""
    default_storage_size: str = "10Gi"
    """Size of a new volume, if the run names none."""
    default_storage_class: str | None = None
    """Storage class of a new volume, if the run names none. Empty: the cluster's default."""
    storage_access_mode: str = ""
    """Access mode of new volumes, if the run names none. Empty: ReadWriteOnce for a run of one node,
    otherwise ReadWriteMany."""
    allowed_service_accounts: tuple[str, ...] = ()
    """Name of a service account that runs can use. If no name is given, runs have no account."""
    allowed_images: tuple[str, ...] = ()
    """Prefix of the images that pods of runs can use. If no prefix is given, any image."""
    allowed_priority_classes: tuple[str, ...] = ()
    """Name of a PriorityClass that pods of runs can use. If no name is given, any class."""
    allow_run_deletion: bool = False
    """Delete finished runs that request it (``spec.ttlDeletes: Run``)."""
    node_ephemeral_storage: str = ""
    """Ephemeral storage that a node of a run requests, if its requests and limits do not name it. Empty:
    none."""
    node_ephemeral_storage_limit: str = ""
    """Limit of ephemeral storage of a node of a run. Empty: no limit."""
    preparation_ephemeral_storage: str = ""
    """Ephemeral storage that a pod for data preparation requests. Empty: none."""
    preparation_ephemeral_storage_limit: str = ""
    """Limit of ephemeral storage of a pod for data preparation. Empty: no limit."""
    evaluation_ephemeral_storage: str = ""
    """Ephemeral storage that an evaluation pod requests. Empty: none."""
    evaluation_ephemeral_storage_limit: str = ""
    """Limit of ephemeral storage of an evaluation pod. Empty: no limit."""
    coordinator_ephemeral_storage: str = ""
    """Ephemeral storage that a coordinator requests. Empty: none."""
    coordinator_ephemeral_storage_limit: str = ""
    """Limit of ephemeral storage of a coordinator. Empty: no limit."""
    scratch_size: str = "50Gi"
    """Maximum size of /tmp in a training pod without a limit of ephemeral storage. Empty: no limit."""
    node_loss_toleration_seconds: int = 5
    """Seconds that a pod stays on a node that is not ready."""
    coordinator_cpu: str = "20m"
    """CPU request of a coordinator."""
    coordinator_memory: str = "64Mi"
    """Memory request of a coordinator."""
    coordinator_cpu_limit: str = "1"
    """CPU limit of a coordinator. A quota can require limits, and a run sets limits only for its nodes."""
    coordinator_memory_limit: str = "256Mi"
    """Memory limit of a coordinator."""
    shared_memory_size: str = ""
    """Maximum size of /dev/shm in a training pod. Empty: the pod's memory limit."""
    user_id: int = 10001
    """User id of a run's pods."""
    group_id: int = 10001
    """Group id of a run's pods and of its volume."""
    first_backoff_seconds: float = 2.0
    """Seconds before the second replacement after failures that count. The first replacement is immediate,
    and each later one waits twice as long."""
    longest_backoff_seconds: float = 60.0
    """Maximum wait, in seconds, before a replacement."""
    longest_host_backoff_seconds: float = 300.0
    """Maximum wait, in seconds, before the next attempt of a node that several hosts have failed."""
    give_back_seconds: float = 1200.0
    """Seconds that the pods of a run below its minimum wait for a host before all are given back. A cluster
    that scales up needs minutes."""
    short_life_seconds: float = 20.0
    """Lifetime, in seconds, below which a pod counts as short-lived. After three such pods in a row,
    replacements wait, too."""
    undisturbed_seconds: float = UNDISTURBED_SECONDS
    """Lifetime, in seconds, of a pod that counts as progress, if the run reports neither steps nor
    checkpoints."""
    finish_grace_seconds: float = 60.0
    """Seconds for the pods of a complete run to write the report and end."""
    fail_grace_seconds: float = 10.0
    """Seconds for the pods of a failed run to end by themselves."""
    price_gpu_hour: float = 0.0
    """Price of an accelerator for one hour. 0: no cost is shown."""
    price_pod_hour: float = 0.0
    """Price of a pod on a host for one hour, without its accelerators. 0: no cost is shown."""
    price_currency: str = ""
    """Currency of the prices, shown after the cost."""
    propagated_labels: tuple[str, ...] = ()
    """Name of a label of a run that is copied to its objects and to its metric of labels."""

    @property
    def installation(self) -> Installation:
        """The part that runs are checked against."""
        return Installation(
            self.allowed_service_accounts,
            self.storage_access_mode,
            deletes_runs=self.allow_run_deletion,
            images=self.allowed_images,
            priority_classes=self.allowed_priority_classes,
            profiles=self.profiles,
        )
