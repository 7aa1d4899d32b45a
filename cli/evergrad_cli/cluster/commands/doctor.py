"""``evergrad doctor``: checks whether this user can train in this namespace of this cluster.

Prints one line for each check, with a remedy.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from evergrad_cli import __version__
from evergrad_cli.cluster.client.api_client import Cluster, connect, core_path, runs_path
from evergrad_cli.cluster.client.arguments import add_cluster_arguments, say, say_json
from evergrad_cli.cluster.client.errors import (
    CHECK_FAILED,
    NotFoundError,
    RefusedError,
    UnreachableError,
)
from evergrad_cli.cluster.client.raw import part
from evergrad_cli.cluster.diagnosis import checks, webhook_checks
from evergrad_cli.cluster.diagnosis.checks import Check, CheckState
from evergrad_cli.cluster.diagnosis.claim_checks import check_claims
from evergrad_cli.cluster.diagnosis.webhook_checks import Asked, WebhookAnswer
from evergrad_cli.cluster.render.runs import parse_run
from evergrad_cli.cluster.render.text import printable
from evergrad_common.contract import API_GROUP, ExitCode

NAME = "doctor"
EXAMPLES = """\
  evergrad doctor
  evergrad doctor -n training --operator-namespace evergrad-system
  evergrad doctor --json | jq -r '.checks[] | select(.state == "fail") | .remedy'

exit codes: 0 no check fails (warnings are allowed) · 1 a check fails · 64 no kubeconfig ·
70 the cluster does not answer"""
_OPERATOR: Final = {
    "labelSelector": "app.kubernetes.io/part-of=evergrad,app.kubernetes.io/component=operator"
}
Objects = list[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument(
        "--operator-namespace",
        metavar="NAMESPACE",
        help="namespace of the operator (default: search for it)",
    )
    add_cluster_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Run all checks. Return 0, or 1 if a check fails."""
    with connect(args) as cluster:
        found = examine(
            cluster, operator_namespace=args.operator_namespace, now=time.time()
        )
    code = (
        CHECK_FAILED
        if any(check.state is CheckState.FAIL for check in found)
        else int(ExitCode.DONE)
    )
    if args.json:
        say_json({"healthy": code == 0, "checks": [asdict(check) for check in found]})
    else:
        for line in render(found):
            say(line)
    return code


def render(found: Sequence[Check]) -> list[str]:
    """Return one line for each check, its remedy below it, and a summary at the end."""
    width = max(len(check.name) for check in found)
    lines = []
    for check in found:
        lines.append(f"{check.state:<4}  {check.name:<{width}}  {printable(check.message)}")
        if check.remedy:
            lines.append(f"{'':<4}  {'':<{width}}  → {printable(check.remedy)}")
    counts = {state: sum(check.state is state for check in found) for state in CheckState}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return [*lines, "", told]


def examine(cluster: Cluster, *, operator_namespace: str | None, now: float) -> list[Check]:
    """Run all checks. Raises UnreachableError if not even the version can be read."""
    # Check from the outside in, so that the first failure is the cause of the failures after it: first the
    # cluster, then the installation, the user's namespace, and last the machines.
    found = [checks.check_version(cluster.get("/version", what="version"), cluster.host)]
    crd, is_served = _check_crd(cluster)
    found.append(crd)
    within = "" if operator_namespace is None else f"/namespaces/{operator_namespace}"
    deployments = _list(cluster, f"/apis/apps/v1{within}/deployments", _OPERATOR)
    found.append(checks.check_operator(deployments, __version__))
    if deployments:
        found.append(_check_lease(cluster, deployments, now))
    found.append(_check_webhook(cluster, now))
    found += _examine_namespace(cluster, deployments or (), is_served=is_served)
    found += _examine_machines(cluster)
    return found


def _check_crd(cluster: Cluster) -> tuple[Check, bool]:
    """Return the check, and whether the API server serves TrainingRuns."""
    # Discovery shows whether the API server serves TrainingRuns even if the user may not read the CRD.
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{checks.CRD_NAME}"
    raw, may_read = _read(lambda: cluster.get(path, what=f"crd {checks.CRD_NAME}"))
    group = f"/apis/{API_GROUP}/{checks.VERSION}"
    served, _ = _read(lambda: cluster.get(group, what="API group"))
    resources = (served or {}).get("resources") or ()
    is_served = any(one.get("name") == "trainingruns" for one in resources)
    return checks.check_crd(raw, is_served=is_served, may_read=may_read), is_served


def _check_lease(
    cluster: Cluster, deployments: Sequence[Mapping[str, Any]], now: float
) -> Check:
    # The chart gives the lease the Deployment's name. Other operators have leases in this namespace, too.
    place = deployments[0]["metadata"]["namespace"]
    names = {one["metadata"]["name"] for one in deployments}
    leases = _list(cluster, f"/apis/coordination.k8s.io/v1/namespaces/{place}/leases")
    if leases is not None:
        leases = [one for one in leases if one["metadata"]["name"] in names]
    return checks.check_lease(leases, now=now)


def _examine_namespace(
    cluster: Cluster, deployments: Sequence[Mapping[str, Any]], *, is_served: bool
) -> list[Check]:
    """Check what this user and a run may do in the namespace in which runs are created."""
    namespace = cluster.namespace
    rights = {right: _may(cluster, right, namespace) for right in checks.RIGHTS}
    found = [checks.check_rights(rights, namespace)]
    raw, may_read = _read(
        lambda: cluster.get(
            core_path("namespaces", None, namespace), what=f"namespace {namespace}"
        )
    )
    found.append(checks.check_namespace(raw, namespace, may_read=may_read))
    found.append(
        checks.check_storage(_list(cluster, "/apis/storage.k8s.io/v1/storageclasses"))
    )
    ranges = _list(cluster, core_path("limitranges", namespace))
    found.append(checks.check_limits(ranges, _read_coordinator_limits(deployments)))
    found.append(
        check_claims(
            _list(cluster, runs_path(namespace)),
            _list(cluster, core_path("persistentvolumeclaims", namespace)),
        )
    )
    found.append(
        checks.check_quotas(
            _list(cluster, core_path("resourcequotas", namespace)),
            defaults=checks.read_limits(ranges or ()).defaults,
            waiting=_list_waiting(cluster, namespace) if is_served else (),
        )
    )
    found.append(
        checks.check_network(
            _list(
                cluster,
                f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
            )
        )
    )
    return found


def _examine_machines(cluster: Cluster) -> list[Check]:
    """Check the machines, and other parts of the cluster that a run can use."""
    found = [checks.check_nodes(_list(cluster, core_path("nodes")))]
    groups = cluster.get("/apis", what="API groups").get("groups") or ()
    found += checks.check_groups({str(group.get("name")) for group in groups})
    # List the images although they cannot be checked, so that a result without failures does not seem to
    # include them.
    why = (
        "only a node can pull images, because it has the credentials; if it cannot, the run is "
        "ImagePullFailed"
    )
    found.append(Check("images", CheckState.SKIP, why))
    return found


def _read(read: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, bool]:
    """Return the object, or None if it does not exist, and whether this user may read it."""
    # A refusal is not a failure: most users may read only their own namespace.
    try:
        return read(), True
    except NotFoundError:
        return None, True
    except RefusedError:
        return None, False


_COORDINATOR_LIMITS: Final = {
    "memory": ("EVERGRAD_COORDINATOR_MEMORY_LIMIT", "256Mi"),
    "cpu": ("EVERGRAD_COORDINATOR_CPU_LIMIT", "1"),
}
"""For each resource of a coordinator: the operator's variable with its limit, and the default limit."""


def _read_coordinator_limits(deployments: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the limits of each run's coordinator, as the operator's Deployment sets them."""
    variables: dict[str, str] = {}
    for raw in deployments:
        for container in part(raw, "spec", "template", "spec").get("containers") or ():
            for one in container.get("env") or ():
                variables[str(one.get("name"))] = str(one.get("value", ""))
    return {
        name: variables.get(variable) or default
        for name, (variable, default) in _COORDINATOR_LIMITS.items()
    }


def _list_waiting(cluster: Cluster, namespace: str) -> list[tuple[str, str]]:
    """Return the runs of the namespace that wait for a quota, each with its message."""
    runs = map(parse_run, _list(cluster, runs_path(namespace)) or ())
    return [(run.name, run.message) for run in runs if run.reason == "QuotaExceeded"]


def _list(
    cluster: Cluster, path: str, query: dict[str, str] | None = None
) -> Objects | None:
    """Return the objects at ``path``, or None if this user may not list them or the cluster does not serve
    them."""
    try:
        return list(cluster.items(path, what=path.rpartition("/")[2], query=query))
    except (NotFoundError, RefusedError):
        return None


def _check_webhook(cluster: Cluster, now: float) -> Check:
    # Send a run that only the webhook refuses, as a dry run: the API server calls the webhook as for a real
    # run.
    try:
        cluster.send(
            "POST",
            runs_path(cluster.namespace),
            webhook_checks.QUESTION,
            what="a trainingrun, as a dry run",
            query={"dryRun": "All"},
        )
        asked = Asked(WebhookAnswer.ACCEPTED)
    except RefusedError as error:
        asked = webhook_checks.judge_refusal(
            [one.path for one in error.problems], str(error)
        )
    except NotFoundError as error:
        asked = Asked(WebhookAnswer.UNKNOWN, str(error))
    except UnreachableError as error:
        asked = webhook_checks.judge_failure(str(error))
    asked = replace(asked, namespace=cluster.namespace)
    if asked.answer in (WebhookAnswer.REFUSED, WebhookAnswer.UNKNOWN):
        return webhook_checks.check_webhook(asked, None, None, None, now=now)

    # The webhook does not work. Read the Secret only now, because it also has the private key.
    path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    configurations = _list(cluster, path)
    webhook = webhook_checks.find_webhook(configurations or (), cluster.namespace)
    namespace, name = webhook_checks.service_of(webhook)
    slices, secret = None, None
    if name:
        slices = _list(
            cluster,
            f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
            {"labelSelector": f"kubernetes.io/service-name={name}"},
        )
        path = core_path("secrets", namespace, f"{name}-webhook")
        secret, _ = _read(lambda: cluster.get(path, what="secret of the webhook"))
    return webhook_checks.check_webhook(asked, configurations, slices, secret, now=now)


def _may(cluster: Cluster, right: checks.Right, namespace: str) -> bool | None:
    """Return whether this user has one right. None if the API server does not answer."""
    # Send an access review instead of a trial request: nothing is changed, and rights of commands that write
    # can be checked, too.
    attributes = {
        "namespace": namespace,
        "verb": right.verb,
        "group": right.group,
        "resource": right.resource,
    }
    if right.subresource:
        attributes["subresource"] = right.subresource
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    try:
        answer = cluster.send("POST", path, body, what="access review")[1]
    except (RefusedError, UnreachableError):
        return None
    return (answer.get("status") or {}).get("allowed") is True
