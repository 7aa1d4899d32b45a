"""Starts one node's box: containerd, kubelet and kube-proxy with their configurations."""

import json
import shutil
from datetime import datetime
from pathlib import Path

from bed import boxes, toolbox
from bed.api import Api, ApiError
from bed.places import CONTROL_ADDRESS, FAMILIES, NAME, PODS, Node, logs, pki, work
from bed.shell import run, wait_until

SOCKET = "/run/containerd/containerd.sock"  # of the node's own /run
PAUSE = "localhost/pause:local"
READY = b"Start streaming server"  # the last line in its log before it accepts requests of the kubelet
_OFF = ("aufs", "btrfs", "devmapper", "zfs")
_IPV6_SYSCTLS = (
    "sysctl -qw net.ipv6.conf.all.forwarding=1 net.bridge.bridge-nf-call-ip6tables=1"
)
CONTAINERD = """\
version = 2
root = "{root}"
state = "{state}"
disabled_plugins = [{off}]
oom_score = 0
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{state}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{runc}"
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{cni}"
"""


def init_script(node: Node) -> str:
    """Return the script that the box runs first.

    It mounts its own /run, /var/lib and /var/log, so that default paths can be used without changing the
    machine's.
    """
    home = work() / node.name
    return f"""mount --make-rshared /
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock
mount --bind {home}/varlib /var/lib
mount --make-rshared /var/lib
mount --bind {home}/varlog /var/log
hostname {node.name}
ip link set lo up
sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.route_localnet=1
sysctl -qw net.bridge.bridge-nf-call-iptables=1
{_IPV6_SYSCTLS if "ipv6" in [family.name for family in FAMILIES] else ""}"""


def containerd_configuration(root: Path, state: str, socket: str, cni: Path) -> str:
    """Return containerd's config.toml.

    A machine without CAP_SYS_RESOURCE needs the settings for out-of-memory scores.
    """
    kinds = [f'"io.containerd.snapshotter.v1.{name}"' for name in _OFF]
    runc = shutil.which("runc") or "/usr/sbin/runc"
    values = {
        "root": root,
        "state": state,
        "socket": socket,
        "cni": cni,
        "off": ", ".join(kinds),
        "pause": PAUSE,
        "runc": runc,
    }
    return CONTAINERD.format(**values)


def prepare(node: Node, golden: Path | None) -> None:
    """Write folders and configurations. `golden`: containerd's folder with all images, which is cloned by
    links."""
    home = work() / node.name
    for folder in ("varlib", "varlog", "cni"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    if golden is not None:
        clone(golden, home / "root")
    state = "/run/containerd/state"
    (home / "containerd.toml").write_text(
        containerd_configuration(home / "root", state, SOCKET, home / "cni")
    )
    (home / "cni" / "10-bed.conflist").write_text(json.dumps(_cni(node), indent=2))
    (home / "resolv.conf").write_text(f"nameserver {CONTROL_ADDRESS}\n")
    (home / "kubelet.yaml").write_text(json.dumps(_kubelet(node), indent=2))
    (home / "kube-proxy.yaml").write_text(json.dumps(_proxy(node), indent=2))


def clone(golden: Path, target: Path) -> None:
    """Clone the golden root for a node with hard links, because committed layers are never written. Only the
    databases are copied."""
    run(["cp", "-al", golden, target])
    for database in golden.rglob("*.db"):
        copy = target / database.relative_to(golden)
        copy.unlink()
        shutil.copy2(database, copy)


def start_box(node: Node) -> None:
    """Start the box, its link to the bridge, and its containerd: everything that needs no API server."""
    boxes.start(node.name, init_script(node))
    boxes.connect_node(node)
    log = log_of(node, "containerd")
    (work() / node.name / "containerd.begun").write_text(
        str(log.stat().st_size if log.exists() else 0)
    )
    boxes.spawn(
        node.name,
        "containerd",
        ["containerd", "--config", work() / node.name / "containerd.toml"],
    )


def start_kubelet(node: Node) -> None:
    """Start the kubelet, which registers the node.

    Wait for containerd first, because a kubelet without it exits immediately.
    """
    begun = int((work() / node.name / "containerd.begun").read_text())
    log = log_of(node, "containerd")
    wait_until(
        f"containerd of {node.name}", lambda: READY in log.read_bytes()[begun:], seconds=180
    )
    home = work() / node.name
    command: list[object] = [
        toolbox.binary("kubelet"),
        f"--config={home}/kubelet.yaml",
        f"--node-ip={','.join(node.addresses)}",
    ]
    command += [
        f"--kubeconfig={pki()}/{node.name}-client.kubeconfig",
        f"--hostname-override={node.name}",
    ]
    boxes.spawn(node.name, "kubelet", command)


def start_proxy(node: Node) -> None:
    """Start kube-proxy, which implements Services with nftables in the node's network namespace."""
    boxes.spawn(
        node.name,
        "kube-proxy",
        [toolbox.binary("kube-proxy"), f"--config={work() / node.name}/kube-proxy.yaml"],
    )


def is_ready(api: Api, node: Node, *, since: datetime | None = None) -> bool:
    """Return whether the API server shows the node as Ready; with `since`, by a heartbeat after that time."""
    try:
        found = api.get(f"/api/v1/nodes/{node.name}")
    except (ApiError, OSError):
        return False
    ready = next(
        (
            entry
            for entry in found["status"].get("conditions", [])
            if entry["type"] == "Ready"
        ),
        None,
    )
    if ready is None or ready["status"] != "True":
        return False
    return since is None or datetime.fromisoformat(ready["lastHeartbeatTime"]) > since


def log_of(node: Node, name: str) -> Path:
    """Return the path of the log of one of the node's daemons."""
    return logs() / f"{node.name}-{name}.log"


def ctr(node: Node, *words: str | Path) -> str:
    """Run containerd's own command in the namespace of the kubelet's images, and return its output."""
    return boxes.inside(
        node.name, ["ctr", "--address", SOCKET, "--namespace", "k8s.io", *words]
    )


def _cni(node: Node) -> dict[str, object]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": "/run/cni",
            "ranges": [[{"subnet": pods}] for pods in node.pods],
            "routes": [{"dst": family.everywhere} for family in FAMILIES],
        },
    }
    return {
        "cniVersion": "0.4.0",
        "name": "bed",
        "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}],
    }


def _kubelet(node: Node) -> dict[str, object]:
    home = work() / node.name
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{NAME}/{node.name}",
        "failCgroupV1": False,
        "oomScoreAdj": 0,
        "maxOpenFiles": 20000,
        "enforceNodeAllocatable": ["pods"],
        "evictionHard": {
            "memory.available": "200Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "resolvConf": str(home / "resolv.conf"),
        "seccompDefault": True,
        "clusterDNS": [CONTROL_ADDRESS],
        "clusterDomain": "cluster.local",
        "address": node.address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki() / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki() / f"{node.name}-server.crt"),
        "tlsPrivateKeyFile": str(pki() / f"{node.name}-server.key"),
        "nodeStatusUpdateFrequency": "1s",
        "nodeLeaseDurationSeconds": 4,
        "syncFrequency": "5s",
        "healthzPort": 0,
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        "eventRecordQPS": 0,
        "registryPullQPS": 0,
        "serializeImagePulls": False,
    }


def _proxy(node: Node) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(pki() / "kube-proxy.kubeconfig")},
        "mode": "nftables",
        "clusterCIDR": PODS,
        "hostnameOverride": node.name,
        "conntrack": {"maxPerCore": 0, "min": 0},
    }
