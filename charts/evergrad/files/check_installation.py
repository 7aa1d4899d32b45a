"""The pod of `helm test`: is the CRD served, may the operator do all it has to, and does it answer?

Arguments: the operator's address; the namespaces it serves as a JSON list, "" being all; its RBAC rules as
JSON.
"""

import itertools
import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REVIEW = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}


def ask(path, body=None):
    """The API server's answer to GET, or to POST of `body`."""
    request = urllib.request.Request(
        f"https://kubernetes.default.svc{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}",
            "Content-Type": "application/json",
        },
    )
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=10, context=context) as answer:
        return json.load(answer)


def may(namespace, group, resource, verb):
    """Whether this ServiceAccount, the operator's, may do that."""
    name, _, subresource = resource.partition("/")
    asked = {
        "namespace": namespace,
        "group": group,
        "resource": name,
        "subresource": subresource,
        "verb": verb,
    }
    review = {**REVIEW, "spec": {"resourceAttributes": asked}}
    return ask("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)["status"][
        "allowed"
    ]


def find_crd():
    served = {
        resource["name"] for resource in ask("/apis/evergrad.dev/v1alpha1")["resources"]
    }
    missing = {"trainingruns", "trainingruns/status"} - served
    return (
        f"the API server does not serve {', '.join(sorted(missing))}" if missing else None
    )


def find_rights(namespaces, rules):
    rights = [
        right
        for rule in rules
        for right in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])
    ]
    lacking = [
        f"{verb} {name} in {namespace or 'all namespaces'}"
        for namespace in namespaces
        for group, name, verb in rights
        if not may(namespace, group, name, verb)
    ]
    return f"the operator may not {', '.join(lacking)}" if lacking else None


def find_health(address):
    problem = ""
    for _ in range(30):
        try:
            for path in ("/healthz", "/readyz", "/metrics"):
                urllib.request.urlopen(address + path, timeout=5).read()
            return None
        except urllib.error.HTTPError as error:
            problem = (
                f"{path}: {error.code} {error.read().decode(errors='replace').strip()}"
            )
        except OSError as error:
            problem = f"{path}: {error}"
        time.sleep(1)
    return f"the operator at {address} is not well: {problem}"


def main(address, namespaces, rules):
    checks = {
        "the CRD is served": find_crd,
        "the operator has its rights": lambda: find_rights(
            json.loads(namespaces), json.loads(rules)
        ),
        "the operator is well": lambda: find_health(address),
    }
    is_good = True
    for text, check in checks.items():
        try:
            problem = check()
        except (OSError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
        print(
            f"ok      {text}" if problem is None else f"FAILED  {text}: {problem}",
            flush=True,
        )
        is_good = is_good and problem is None
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
