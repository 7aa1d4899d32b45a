"""The Secret with a run's token: what its nodes, its coordinator and the operator show each other."""

from typing import Final

from evergrad_operator import names
from evergrad_operator.plan.common import JsonObject, build_metadata
from evergrad_operator.spec import TrainingRun

_VOLUME: Final = "evergrad-token"


def build_token_secret(run: TrainingRun, token: str) -> JsonObject:
    """The Secret, which goes with its run.

    It is only ever created: the operator may not read or change Secrets of runs.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": build_metadata(run, names.token_secret_name(run.name, token)),
        "type": "Opaque",
        # The kubelet need not watch an immutable Secret, and nobody can swap a token under living pods.
        "immutable": True,
        "stringData": {names.TOKEN_KEY: token},
    }


def build_token_volume(run: TrainingRun, token: str) -> JsonObject:
    """The volume of a pod that holds the token."""
    return {"name": _VOLUME, "secret": {"secretName": names.token_secret_name(run.name, token)}}


def build_token_mount() -> JsonObject:
    """Where a container finds it."""
    return {"name": _VOLUME, "mountPath": names.TOKEN_PATH, "readOnly": True}


def build_token_arguments() -> tuple[str, str]:
    """The arguments by which coordinator and node find it."""
    return "--token-file", f"{names.TOKEN_PATH}/{names.TOKEN_KEY}"
