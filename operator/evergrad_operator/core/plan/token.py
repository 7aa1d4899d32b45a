"""The Secret with a run's token, with which its nodes, its coordinator and the operator authenticate."""

from typing import Final

from evergrad_operator.core.objects import names
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.plan.common import JsonObject, build_metadata

TOKEN_OPTION: Final = "--token-file"
"""Option of a coordinator or node for the path of the token's file."""


def build_token_secret(run: ParsedRun, token: str) -> JsonObject:
    """Build the Secret, which is deleted with its run.

    The operator only creates it, because it may not read or change the Secrets of runs.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": build_metadata(run, names.token_secret_name(run.name, token)),
        "type": "Opaque",
        # The kubelet does not watch an immutable Secret, and the token of running pods is never replaced.
        "immutable": True,
        "stringData": {names.TOKEN_KEY: token},
    }


def build_token_volume(run: ParsedRun, token: str) -> JsonObject:
    """Build the volume of a pod that contains the token."""
    return {
        "name": names.TOKEN_VOLUME,
        "secret": {"secretName": names.token_secret_name(run.name, token)},
    }


def build_token_mount() -> JsonObject:
    """Build the mount of this volume in a container."""
    return {
        "name": names.TOKEN_VOLUME,
        "mountPath": names.TOKEN_PATH,
        "readOnly": True,
    }


def build_token_arguments() -> tuple[str, str]:
    """Return the arguments of a coordinator or node that name the token's file."""
    return TOKEN_OPTION, f"{names.TOKEN_PATH}/{names.TOKEN_KEY}"
