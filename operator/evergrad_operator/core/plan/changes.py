"""Compares an edited run with the manifest that its pods use. Pure."""

import json

from evergrad_manifest.identity import changed_settings, settings_hash
from evergrad_manifest.model.differences import show_value
from evergrad_manifest.validation import read_object, with_plain_numbers
from evergrad_operator.core.observe.observe import AppliedSettings, Observation
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.plan.config_map import build_manifest


def is_edited(observation: Observation) -> bool:
    """Return whether a typed run that has begun was edited since its last status.

    Only such a run needs a request for the manifest in its ConfigMap.
    """
    run, memory = observation.run, observation.status
    return (
        memory.is_known
        and bool(memory.recipe_hash)
        and memory.finish is None
        and run.parsed.is_typed
        and not run.parsed.problems
        and not run.is_deleting
        and run.has_new_spec
    )


def compare_settings(applied: str, run: ParsedRun) -> AppliedSettings | None:
    """Compare the manifest in the run's ConfigMap with the run's current manifest.

    Returns None if the manifest in the ConfigMap cannot be read as a typed run, for example because an older
    version or another client wrote it.
    """
    try:
        # Convert both to the current spelling, as in parse_run.
        texts = (applied, build_manifest(run))
        manifests = [with_plain_numbers(json.loads(text))[0] for text in texts]
        before, after = (read_object(one) for one in manifests)
        changes = changed_settings(before, after)
        return AppliedSettings(
            settings_hash(before),
            tuple(
                f"{path}: {show_value(old)} → {show_value(new)}"
                for path, old, new in changes
            ),
        )
    # The text may be any JSON, such as a number or a script's manifest. Return None and not "unchanged", so
    # that the policies restart all pods.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
