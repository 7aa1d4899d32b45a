"""The Helm chart rendered and checked without a cluster.

python -m bed.chart     `make chart-lint`: helm lint --strict, and kubeconform -strict on each rendering of MATRIX;
                        chart-testing's `ct lint`, and the chart's own tests (helm-unittest)
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from bed import schemas, toolbox
from bed.places import REPOSITORY
from bed.shell import BedError, run

CHART = REPOSITORY / "charts/evergrad"
NAMESPACE = "evergrad-system"
KUBERNETES = (
    "1.34.4"  # what is rendered for; helm built by itself takes an old one for granted
)
MATRIX: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "fullnameOverride": "operators",
        "commonLabels": {"team": "training"},
        "image": {"repository": "registry.example.com/evergrad/operator", "tag": "1.2.3"},
        "imagePullSecrets": [{"name": "registry"}],
        "trainer": {
            "image": {
                "repository": "registry.example.com/evergrad/trainer",
                "digest": "sha256:" + "ab" * 32,
            }
        },
        "runs": {
            "imagePullSecrets": ["registry", "other"],
            "storage": {"storageClassName": "nfs", "size": "1Ti"},
            "clusterDomain": "svc.cluster.local",
        },
        "serviceAccount": {"annotations": {"example.com/role": "x"}},
        "operator": {
            "logFormat": "json",
            "extraArgs": ["--log-level", "debug"],
            "extraEnv": [{"name": "TZ", "value": "UTC"}],
        },
        "replicas": 3,
        "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]},
        "service": {"annotations": {"example.com/zone": "a"}},
        "podLabels": {"a": "b"},
        "podAnnotations": {"c": "d"},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "x", "operator": "Exists"}],
        "affinity": {
            "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}
        },
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "priorityClassName": "system-cluster-critical",
        "extraVolumes": [{"name": "extra", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
        "networkPolicy": {
            "enabled": True,
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        },
        "priorityClasses": [
            {
                "name": "evergrad-low",
                "value": -10,
                "preemptionPolicy": "Never",
                "description": "Waits.",
            }
        ],
        "metrics": {
            "enabled": True,
            "labels": {"release": "stack"},
            "annotations": True,
            "rules": {
                "disabled": ["TrainingRunFailed"],
                "thresholds": {"stalledSeconds": 900},
            },
            "dashboards": {
                "namespace": "grafana",
                "annotations": {"grafana_folder": "Runs"},
            },
        },
        "admissionPolicy": {
            "enabled": True,
            "allowedImages": ["registry.example.com/", "localhost/"],
            "allowedPriorityClasses": ["evergrad-low"],
            "maxNodes": 64,
        },
        "operatorPolicy": {"enabled": True},
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": '{{ include "evergrad.fullname" . }}-extra'},
                "data": {},
            }
        ],
    },
    "namespaced": {"rbac": {"scope": "namespaced", "aggregatedRoles": False}},
    "namespaces": {
        "rbac": {"scope": "namespaced", "watchNamespaces": ["team-a", "team-b"]},
        "runs": {"metricsFrom": ["monitoring"]},
        "metrics": {"enabled": True},
    },
    "existing account": {
        "serviceAccount": {"create": False, "name": "ours"},
        "rbac": {"create": False},
    },
    "no CRD": {"crds": {"install": False}, "tests": {"enabled": False}},
    "CRD goes with the release": {"crds": {"keep": False}},
    "runs without policies": {
        "runs": {"networkPolicies": False, "disruptionBudgets": False}
    },
}


def helm(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run helm. Raises BedError with its output if it fails and `check` is set."""
    done = subprocess.run(
        [toolbox.binary("helm"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if check and done.returncode != 0:
        raise BedError(f"helm {arguments[0]}: {done.stdout}{done.stderr}")
    return done


def template(
    values: dict[str, Any], *, release: str = "evergrad", namespace: str = NAMESPACE
) -> str:
    """Return the rendered chart as YAML. Raises BedError if the chart refuses the values."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file)
        file.flush()
        return helm(
            "template",
            release,
            CHART,
            "--kube-version",
            KUBERNETES,
            "--namespace",
            namespace,
            "--values",
            file.name,
        ).stdout


def render(
    values: dict[str, Any], *, release: str = "evergrad", namespace: str = NAMESPACE
) -> list[dict[str, Any]]:
    """Return the objects of the rendered chart."""
    return [
        one
        for one in yaml.safe_load_all(
            template(values, release=release, namespace=namespace)
        )
        if one
    ]


def lint(values: dict[str, Any]) -> None:
    """Run helm lint --strict. Raises BedError with its findings."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file)
        file.flush()
        helm(
            "lint",
            "--strict",
            "--quiet",
            "--kube-version",
            KUBERNETES,
            CHART,
            "--values",
            file.name,
        )


def conform(files: Sequence[Path], *, more: Sequence[Path] = ()) -> str:
    """Run kubeconform -strict, and return its summary.

    It uses the schemas of Kubernetes, Prometheus Operator, Evergrad and the folders ``more``. Raises BedError
    with its findings.
    """
    with tempfile.TemporaryDirectory() as scratch:
        ours = schemas.of_ours(Path(scratch))
        locations = [
            f"{folder}/{{{{ .ResourceKind }}}}{{{{ .KindSuffix }}}}.json"
            for folder in (ours, schemas.of_monitoring(), schemas.of_kubernetes(), *more)
        ]
        options = [
            word for location in locations for word in ("-schema-location", location)
        ]
        return run(
            [toolbox.binary("kubeconform"), "-strict", "-summary", *options, *files]
        ).strip()


def run_unit_tests(chart: Path = CHART) -> str:
    """Run the chart's tests in its folder tests/, and return helm-unittest's summary.

    Raises BedError with the failures.
    """
    return run([toolbox.binary("helm-unittest"), "--strict", chart]).strip()


def run_chart_testing() -> None:
    """Run `ct lint`: it checks that the chart's description and values are valid YAML with the allowed
    fields.

    Raises BedError with its findings. It does not compare versions with a branch.
    """
    program = toolbox.binary("ct")
    module = json.loads(
        run(
            ["go", "mod", "download", "-json", "github.com/helm/chart-testing/v3"],
            directory=toolbox.SOURCES / "chart-testing",
        )
    )
    rules = Path(module["Dir"], "etc")
    programs = [toolbox.binary("helm").parent, Path(sys.executable).parent]
    command: list[object] = [program, "lint", "--charts", CHART.relative_to(REPOSITORY)]
    command += [
        "--validate-maintainers=false",
        "--chart-yaml-schema",
        rules / "chart_schema.yaml",
    ]
    command += ["--lint-conf", rules / "lintconf.yaml"]
    command += ["--helm-lint-extra-args", f"--strict --kube-version {KUBERNETES}"]
    path = os.pathsep.join([*map(str, programs), os.environ["PATH"]])
    run(command, directory=REPOSITORY, environment={"PATH": path})


def check() -> None:
    """Run all checks, and print a line for each. Raises BedError at the first finding."""
    with tempfile.TemporaryDirectory() as scratch:
        files = []
        for name, values in MATRIX.items():
            lint(values)
            file = Path(scratch, f"{name.replace(' ', '-')}.yaml")
            file.write_text(template(values))
            files.append(file)
            print(f"helm lint --strict: {name}")
        print(f"kubeconform, the chart: {conform(files)}")
    run_chart_testing()
    print("ct lint: sound")
    *_, counted = (
        line for line in run_unit_tests().splitlines() if line.startswith("Tests:")
    )
    print(f"helm-unittest: {counted}")
    # Skip overlays, because an overlay is not a complete object.
    overlays = set((REPOSITORY / "examples").glob("*/cluster*.yaml"))
    examples = sorted({*(REPOSITORY / "examples").glob("*/*.yaml")} - overlays)
    print(f"kubeconform, the examples: {conform(examples)}")


def main() -> int:
    """Return 0 if the chart is valid or its checks are unavailable outside CI, else 1."""
    if (
        shutil.which("go") is None
        and toolbox.missing(("helm", "kubeconform", "chart-testing"))
        and os.environ.get("CI") != "true"
    ):
        print("chart-lint: left out. Its programs are built with Go, which is not here.")
        return 0
    try:
        check()
    except BedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
