"""Finds the claims (PersistentVolumeClaims) that a run names, for the operator and all commands. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from evergrad_common.contract import LABEL_PREFIX
from evergrad_manifest.model.raw import value_at

RECORD_PREFIX: Final = f"run.{LABEL_PREFIX}"
"""Prefix of an annotation of a claim, before the name of a run: the record of that run."""
DROPPED_UNFINISHED: Final = f"{LABEL_PREFIX}dropped-unfinished-runs"
"""Annotation of a claim: the number of runs that no longer exist, were not complete, and whose records did
not fit. The checkpoints of these runs may still be on the claim."""


@dataclass(frozen=True)
class Claims:
    """The claims of one run.

    ``storage``: the claim with its run directory. It exists already, or the operator creates it with the name
    of the run. ``mounted``: claims that its pods mount in addition, in the order of the file.
    """

    storage: str
    mounted: tuple[str, ...] = ()

    @property
    def all(self) -> frozenset[str]:
        """All claims that the run needs."""
        return frozenset((self.storage, *self.mounted))


def claims_of(run: Mapping[str, Any]) -> Claims:
    """Return the claims that ``run``, an object of the API server, names; never raises.

    A profile may add volumes. The operator lists their claims in ``status.volume.profileClaims``, because
    only the operator has the profile of a run without pods.
    """
    existing = value_at(run, ("spec", "storage", "claimName"))
    name = value_at(run, ("metadata", "name"))
    storage = existing if isinstance(existing, str) and existing else str(name or "")

    mounted = dict.fromkeys(mounted_claims(value_at(run, ("spec", "template"))))
    listed = value_at(run, ("status", "volume", "profileClaims"))
    if isinstance(listed, list | tuple):
        mounted |= dict.fromkeys(one for one in listed if isinstance(one, str) and one)
    return Claims(storage, tuple(mounted))


def mounted_claims(template: Any) -> tuple[str, ...]:
    """Return the claims under ``volumes`` of a pod, or of a pod template."""
    volumes = value_at(template, ("volumes",))
    found = (
        value_at(volume, ("persistentVolumeClaim", "claimName"))
        for volume in (volumes if isinstance(volumes, list | tuple) else ())
    )
    return tuple(name for name in found if isinstance(name, str) and name)
