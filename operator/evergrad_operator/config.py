"""The operator's configuration for all runs. Values only; ``settings`` reads them. Pure."""

from dataclasses import dataclass

from evergrad_coordinator.contract import UNDISTURBED_SECONDS
from evergrad_operator.installation import Installation


@dataclass(frozen=True)
class Config:
    """Images and switches of the installation. Times in seconds."""

    trainer_image: str
    """Image of training pods whose run names none."""
    operator_image: str
    """Image of the coordinators, which is the operator's own."""
    image_pull_policy: str = "IfNotPresent"
    """Pull policy of training pods whose run names none."""
    operator_image_pull_policy: str = "IfNotPresent"
    """Pull policy of the coordinators."""
    image_pull_secrets: tuple[str, ...] = ()
    """Name of a pull secret in each run's namespace."""
    network_policies: bool = True
    """Make a NetworkPolicy for each run."""
    metrics_from: tuple[str, ...] = ()
    """Name of a namespace whose pods may scrape nodes and coordinators; none: nodes are open to all,
    coordinators to none."""
    scrape_annotations: bool = False
    """Annotate nodes and coordinators with prometheus.io/*, for a Prometheus that finds targets by them."""
    disruption_budgets: bool = True
    """Make a PodDisruptionBudget for each run whose group has formed."""
    operator_namespace: str = ""
    """Where the operator runs, whose pods may reach the coordinator's status; empty: from any namespace."""
    cluster_domain: str = ""
    """Appended to the coordinator's name (``svc.cluster.local``); empty: ``svc``, which the pod's search list
    completes."""
    gang: str = "none"
    """Group in which a gang scheduler places the nodes that a run cannot do without: none, coscheduling (a
    PodGroup of scheduler-plugins) or podGroup (Kubernetes' own)."""
    scheduler_name: str = ""
    """Scheduler of nodes whose run names none; empty: the cluster's default."""
    profiles: str = ""
    """Profiles of the installation: a JSON object of profiles by their names."""
    default_storage_size: str = "10Gi"
    """Size of a new volume whose run names none."""
    default_storage_class: str | None = None
    """Storage class of a new volume whose run names none; empty: the cluster's default."""
    storage_access_mode: str = ""
    """Access mode of new volumes whose run names none; empty: ReadWriteOnce for a run of one node, else
    ReadWriteMany."""
    allowed_service_accounts: tuple[str, ...] = ()
    """Name of a service account that runs may have; none: no run has one."""
    allowed_images: tuple[str, ...] = ()
    """Beginning of the images that pods of runs may have; none: any image."""
    allowed_priority_classes: tuple[str, ...] = ()
    """Name of a PriorityClass that pods of runs may have; none: any class."""
    allow_run_deletion: bool = False
    """Delete runs that ask for it a while after their end."""
    node_ephemeral_storage: str = ""
    """Ephemeral storage that a node of a run requests, where neither its requests nor its limits name it;
    empty: none."""
    node_ephemeral_storage_limit: str = ""
    """Ephemeral storage that a node of a run may use; empty: no limit."""
    preparation_ephemeral_storage: str = ""
    """Ephemeral storage that a pod which prepares data requests; empty: none."""
    preparation_ephemeral_storage_limit: str = ""
    """Ephemeral storage that a pod which prepares data may use; empty: no limit."""
    evaluation_ephemeral_storage: str = ""
    """Ephemeral storage that a pod which evaluates requests; empty: none."""
    evaluation_ephemeral_storage_limit: str = ""
    """Ephemeral storage that a pod which evaluates may use; empty: no limit."""
    coordinator_ephemeral_storage: str = ""
    """Ephemeral storage that a coordinator requests; empty: none."""
    coordinator_ephemeral_storage_limit: str = ""
    """Ephemeral storage that a coordinator may use; empty: no limit."""
    scratch_size: str = "50Gi"
    """Largest size of /tmp in a training pod without a limit of ephemeral storage; empty: no bound."""
    node_loss_toleration_seconds: int = 5
    """Seconds that a pod stays on a node that is not ready."""
    coordinator_cpu: str = "20m"
    """CPU request of a coordinator."""
    coordinator_memory: str = "64Mi"
    """Memory request of a coordinator."""
    coordinator_cpu_limit: str = "1"
    """CPU limit of a coordinator: a namespace's quota may ask for limits, which a run can give for its nodes
    only."""
    coordinator_memory_limit: str = "256Mi"
    """Memory limit of a coordinator."""
    shared_memory_size: str = ""
    """Largest size of /dev/shm in a training pod; empty: what the pod's memory limit allows."""
    user_id: int = 10001
    """User id that a run's pods run as."""
    group_id: int = 10001
    """Group id of a run's pods and of its volume."""
    first_backoff_seconds: float = 2.0
    """Seconds before the second replacement after failures that count; the first is made at once, each later
    one after twice as long."""
    longest_backoff_seconds: float = 60.0
    """Longest wait, in seconds, before a replacement."""
    longest_host_backoff_seconds: float = 300.0
    """Longest wait, in seconds, before the next try of a node that one host after the other fails: a broken
    host stays so."""
    give_back_seconds: float = 1200.0
    """Seconds that pods of a run below its minimum wait for a host before all are given back: a cluster that
    grows needs minutes for that."""
    short_life_seconds: float = 20.0
    """Lifetime, in seconds, below which a pod was hardly worth its start: after three in a row replacements
    wait, too."""
    undisturbed_seconds: float = UNDISTURBED_SECONDS
    """Lifetime, in seconds, of a pod that counts as progress for a run that reports neither steps nor
    checkpoints."""
    finish_grace_seconds: float = 60.0
    """Seconds for the pods of a complete run to write their report and end."""
    fail_grace_seconds: float = 10.0
    """Seconds for the pods of a failed run to end by themselves."""
    price_gpu_hour: float = 0.0
    """Price of an accelerator for an hour; 0 shows no cost of it."""
    price_pod_hour: float = 0.0
    """Price of a pod on a host for an hour, without its accelerators; 0 shows no cost of it."""
    price_currency: str = ""
    """Currency of the prices, as it is shown behind the cost."""
    propagated_labels: tuple[str, ...] = ()
    """Name of a label of a run that its objects get, and its metric of labels."""

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
