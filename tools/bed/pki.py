"""Certificates and kubeconfigs. openssl creates one pair per command, and the commands run in parallel."""

import base64
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bed.places import API_SERVER, FAMILIES, NODES
from bed.shell import run

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30")


@dataclass(frozen=True)
class Certificate:
    """A certificate and key: the subject and, for a server, its names."""

    subject: str
    names: str = ""  # as in subjectAltName; empty for a client

    @property
    def use(self) -> str:
        """Return the extended key usage."""
        return "serverAuth" if self.names else "clientAuth"


def certificates() -> dict[str, Certificate]:
    """Return every pair that the bed needs, by file name."""
    services = (
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
        "localhost",
    )
    addresses = [
        *(family.api_service for family in FAMILIES),
        *(family.machines.format(1) for family in FAMILIES),
        "127.0.0.1",
    ]
    names = ",".join(
        [*(f"DNS:{name}" for name in services), *(f"IP:{ip}" for ip in addresses)]
    )
    found = {
        "apiserver": Certificate("/CN=kube-apiserver", names),
        "apiserver-kubelet": Certificate(
            "/O=system:masters/CN=kube-apiserver-kubelet-client"
        ),
        "admin": Certificate("/O=system:masters/CN=admin"),
        "storage": Certificate("/O=system:masters/CN=bed:storage"),
        "kube-controller-manager": Certificate("/CN=system:kube-controller-manager"),
        "kube-scheduler": Certificate("/CN=system:kube-scheduler"),
        "kube-proxy": Certificate("/CN=system:kube-proxy"),
        "coredns": Certificate("/O=system:masters/CN=bed:coredns"),
        "kwok": Certificate("/O=system:masters/CN=bed:kwok"),
    }
    for node in NODES:
        found[f"{node.name}-server"] = Certificate(
            f"/CN=system:node:{node.name}",
            ",".join([f"DNS:{node.name}", *(f"IP:{ip}" for ip in node.addresses)]),
        )
        found[f"{node.name}-client"] = Certificate(
            f"/O=system:nodes/CN=system:node:{node.name}"
        )
    return found


def write(folder: Path) -> None:
    """Create the authority, every pair, the ServiceAccount key, and a kubeconfig for each client."""
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    authority: list[object] = [
        "openssl",
        "req",
        "-x509",
        *CURVE,
        "-subj",
        "/CN=evergrad-bed",
        "-addext",
        "keyUsage=critical,keyCertSign,cRLSign",
    ]
    run([*authority, "-keyout", folder / "ca.key", "-out", folder / "ca.crt"])
    wanted = certificates()
    with ThreadPoolExecutor(8) as pool:
        for done in [
            pool.submit(sign, folder, name, pair) for name, pair in wanted.items()
        ]:
            done.result()
    run(
        [
            "openssl",
            "ecparam",
            "-name",
            "prime256v1",
            "-genkey",
            "-noout",
            "-out",
            folder / "sa.key",
        ]
    )
    run(["openssl", "ec", "-in", folder / "sa.key", "-pubout", "-out", folder / "sa.pub"])
    for name, pair in wanted.items():
        if not pair.names:
            write_kubeconfig(folder, name, folder / f"{name}.kubeconfig")


def write_kubeconfig(folder: Path, name: str, target: Path) -> None:
    """Write a kubeconfig for the pair `name`. It contains the certificates, so it can be copied anywhere."""
    cluster = {"server": API_SERVER, "certificate-authority-data": _data(folder / "ca.crt")}
    user = {
        "client-certificate-data": _data(folder / f"{name}.crt"),
        "client-key-data": _data(folder / f"{name}.key"),
    }
    content: Mapping[str, object] = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "bed", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": name}}],
        "current-context": "bed",
    }
    target.touch(mode=0o600)
    target.write_text(json.dumps(content, indent=2) + "\n")


def sign(folder: Path, name: str, pair: Certificate) -> None:
    """Create one pair, signed by the authority in the folder."""
    command: list[object] = [
        "openssl",
        "req",
        "-x509",
        "-CA",
        folder / "ca.crt",
        "-CAkey",
        folder / "ca.key",
        *CURVE,
        "-subj",
        pair.subject,
    ]
    command += [
        "-addext",
        "basicConstraints=critical,CA:FALSE",
        "-addext",
        f"extendedKeyUsage={pair.use}",
    ]
    if pair.names:
        command += ["-addext", f"subjectAltName={pair.names}"]
    run([*command, "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt"])


def _data(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()
