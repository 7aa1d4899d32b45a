"""Starts the control plane's box: etcd, API server, controller manager, scheduler, and CoreDNS or kwok."""

from pathlib import Path

from bed import boxes, toolbox
from bed.api import Api, ApiError
from bed.places import (
    CONTROL_ADDRESS,
    SERVICES,
    SINGLE_CLASS,
    STORAGE_CLASS,
    in_url,
    logs,
    pki,
    work,
)
from bed.shell import wait_until

BOX = boxes.CONTROL
# Keep only requests of workloads' ServiceAccounts: they show which rights an operator uses.
AUDIT = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - {level: None, userGroups: ["system:serviceaccounts:kube-system"]}
  - {level: Metadata, userGroups: ["system:serviceaccounts"]}
  - {level: None}
"""
# A node is NotReady after this many seconds without a renewed lease. Kubelets renew their leases every second,
# but later on a machine whose cores are all busy. kwok renews them every 40 s.
NODE_GRACE = {"full": 12, "next": 12, "kwok": 50}
# Tests of PodGroups use the newer control plane. It serves all versions, so that a client can choose one.
NEXT_GATES = "--feature-gates=GenericWorkload=true"
NEXT_APIS = (
    "--runtime-config=scheduling.k8s.io/v1beta1=true,scheduling.k8s.io/v1alpha3=true"
)
COREDNS = """\
.:53 {{
    bind {address}
    errors
    ready {in_url}:8181
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 1
    }}
    cache 1
}}
"""


def start_box() -> None:
    """Start the box, its bridge and the link to the machine."""
    boxes.start(BOX, "mount --make-rprivate /\nhostname cp\nip link set lo up")
    boxes.connect_control()


def start_etcd() -> None:
    """Start etcd on the box's loopback, without fsync. Its data survives its crash, but not the machine's."""
    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    command: list[object] = [
        toolbox.binary("etcd"),
        "--name=bed",
        f"--data-dir={work() / 'etcd'}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]
    command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    command += [
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=bed={peer}",
    ]
    boxes.spawn(BOX, "etcd", [*command, "--quota-backend-bytes=4294967296"])


def start_apiserver(profile: str) -> None:
    """Start the API server. Except for kwok, it logs ServiceAccount requests to logs/audit.jsonl."""
    keys = pki()
    command: list[object] = [_program("kube-apiserver", profile)]
    command += [
        f"--bind-address={CONTROL_ADDRESS}",
        f"--advertise-address={CONTROL_ADDRESS}",
        "--etcd-servers=http://127.0.0.1:2379",
    ]
    command += [
        f"--client-ca-file={keys}/ca.crt",
        f"--tls-cert-file={keys}/apiserver.crt",
        f"--tls-private-key-file={keys}/apiserver.key",
    ]
    command += [
        f"--service-cluster-ip-range={SERVICES}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
    ]
    command += [
        f"--service-account-key-file={keys}/sa.pub",
        f"--service-account-signing-key-file={keys}/sa.key",
    ]
    command += [
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged",
    ]
    command += [
        f"--kubelet-certificate-authority={keys}/ca.crt",
        "--kubelet-preferred-address-types=InternalIP",
    ]
    command += [
        f"--kubelet-client-certificate={keys}/apiserver-kubelet.crt",
        f"--kubelet-client-key={keys}/apiserver-kubelet.key",
    ]
    command += ["--enable-aggregator-routing", f"--cert-dir={work()}/apiserver"]
    command += [
        "--default-not-ready-toleration-seconds=5",
        "--default-unreachable-toleration-seconds=5",
    ]
    if profile == "next":
        command += [NEXT_GATES, NEXT_APIS]
    if profile != "kwok":
        policy = work() / "audit.yaml"
        policy.write_text(AUDIT)
        command += [
            f"--audit-policy-file={policy}",
            f"--audit-log-path={logs()}/audit.jsonl",
            "--audit-log-maxsize=1024",
        ]
    boxes.spawn(BOX, "kube-apiserver", command)


def wait_for_apiserver(api: Api, *, seconds: float = 600) -> float:
    """Wait until /readyz reports ok, and return the seconds. Raises BedError if the API server dies."""

    def is_ready() -> bool:
        boxes.daemon_pid(BOX, "kube-apiserver")
        try:
            return bool(api.request("GET", "/readyz", timeout=5) == "ok")
        except (ApiError, OSError):
            return False

    return wait_until("API server ready", is_ready, seconds=seconds)


def start_controllers(profile: str) -> None:
    """Start the controller manager and the scheduler."""
    keys = pki()
    gates = [NEXT_GATES] if profile == "next" else []
    manager: list[object] = [
        _program("kube-controller-manager", profile),
        *gates,
        f"--kubeconfig={keys}/kube-controller-manager.kubeconfig",
    ]
    manager += [
        "--use-service-account-credentials",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--root-ca-file={keys}/ca.crt",
    ]
    manager += [
        f"--service-account-private-key-file={keys}/sa.key",
        f"--cluster-signing-cert-file={keys}/ca.crt",
    ]
    manager += [
        f"--cluster-signing-key-file={keys}/ca.key",
        "--node-monitor-period=1s",
        f"--node-monitor-grace-period={NODE_GRACE[profile]}s",
    ]
    manager += [
        "--pvclaimbinder-sync-period=1s",
        "--kube-api-qps=1000",
        "--kube-api-burst=2000",
        f"--cert-dir={work()}/kcm",
    ]
    boxes.spawn(BOX, "kube-controller-manager", manager)
    own = f"{keys}/kube-scheduler.kubeconfig"
    scheduler: list[object] = [
        _program("kube-scheduler", profile),
        *gates,
        f"--kubeconfig={own}",
        f"--authentication-kubeconfig={own}",
    ]
    scheduler += [
        f"--authorization-kubeconfig={own}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
    ]
    scheduler += [
        "--kube-api-qps=1000",
        "--kube-api-burst=2000",
        f"--cert-dir={work()}/scheduler",
    ]
    boxes.spawn(BOX, "kube-scheduler", scheduler)


def start_coredns() -> None:
    """Start the DNS for pods as a process in this box, so that it survives faults of nodes."""
    file = work() / "Corefile"
    file.write_text(
        COREDNS.format(
            address=CONTROL_ADDRESS,
            in_url=in_url(CONTROL_ADDRESS),
            kubeconfig=pki() / "coredns.kubeconfig",
        )
    )
    boxes.spawn(BOX, "coredns", [toolbox.binary("coredns"), "-conf", file])


def start_kwok() -> None:
    """Start kwok, the fake kubelet for nodes annotated kwok.x-k8s.io/node=fake."""
    stages = Path(__file__).with_name("kwok.yaml")
    command: list[object] = [
        toolbox.binary("kwok"),
        f"--kubeconfig={pki()}/kwok.kubeconfig",
        f"--config={stages}",
    ]
    command += [
        "--manage-all-nodes=false",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
    ]
    command += ["--node-lease-duration-seconds=40", "--server-address=127.0.0.1:10247"]
    boxes.spawn(BOX, "kwok", command)


def _program(name: str, profile: str) -> Path:
    return toolbox.binary(f"{name}-next" if profile == "next" else name)


def create_storage_classes(api: Api) -> None:
    """Create the storage classes `shared` (the default) and `single`. bed.storage creates their volumes."""
    for name in (STORAGE_CLASS, SINGLE_CLASS):
        default = (
            {"storageclass.kubernetes.io/is-default-class": "true"}
            if name == STORAGE_CLASS
            else {}
        )
        body = {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name, "annotations": default},
            "provisioner": "bed.local/dir",
            "volumeBindingMode": "Immediate",
            "reclaimPolicy": "Delete",
        }
        api.apply(f"/apis/storage.k8s.io/v1/storageclasses/{name}", body)


def has_default_account(api: Api) -> bool:
    """Return whether pods can be created in the namespace default."""
    return api.is_there("/api/v1/namespaces/default/serviceaccounts/default")
