"""Parses a raw TrainingRun from the API server into the manifest's models, and finds all its problems. Pure.

The models, their defaults and their rules come from the manifest package. This module adds only the fields
that Kubernetes adds to a run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pydantic import ValidationError

from evergrad_common.contract import MANAGER
from evergrad_coordinator.protocol import Recovery
from evergrad_manifest.derive import steps_without_data
from evergrad_manifest.envelope import Spec
from evergrad_manifest.errors import Problem
from evergrad_manifest.identity import (
    RECIPE_SECTIONS,
    config_hash,
    preparation_hash,
    settings_hash,
)
from evergrad_manifest.model.view import without_nulls
from evergrad_manifest.profile import apply_defaults
from evergrad_manifest.validation import FIXED, manifest_of, with_plain_numbers
from evergrad_operator.core.objects.errors import SpecError
from evergrad_operator.core.objects.installation import (
    IMAGE_SETTING,
    NOTHING_ALLOWED,
    Installation,
)
from evergrad_operator.core.objects.names import LABEL_QUEUE, Key, Reason
from evergrad_operator.core.objects.raw import get_int, get_map, get_text
from evergrad_operator.core.objects.recipe_hash import hash_spelling
from evergrad_operator.core.objects.times import parse_time
from evergrad_operator.core.observe.profiles import NO_PROFILE, RunProfile
from evergrad_operator.core.observe.start_checks import check

_FIXED: Final = (
    "spec.script",
    *(f"spec.{field}" for field in FIXED),
    *(f"spec.training.{section}" for section in RECIPE_SECTIONS),
)
"""Paths that cannot change after a run has begun."""
_IMAGE: Final = "spec.image"
_ALLOW_IMAGE: Final = f"Have it added to {IMAGE_SETTING}, or make a new TrainingRun"
"""Remedy for an image that cannot change and is no longer allowed."""
_OUT_OF_THE_VOLUME: Final = "spec.storage.path"


@dataclass(frozen=True)
class ParsedSpec:
    """The content of one generation of a run, without its typed recipe.

    The recipe is large, and only the nodes need it.
    """

    spec: Spec
    """``training`` is always None; ``is_typed`` distinguishes the two kinds of run."""
    is_typed: bool
    is_whole: bool
    """Whether every field could be read.

    If not, a part of the recipe cannot be read.
    """
    problems: tuple[Problem, ...]
    """All problems that ``evergrad validate`` would find, except outdated spellings, and the problems by the
    rules of this installation."""
    outdated: tuple[Problem, ...]
    """Spellings that earlier versions accepted and this version still reads, each with its remedy."""
    recovery: Recovery
    metrics_port: int | None
    """Port of a node's metrics; None if the run does not set one, 0 for any free port."""
    recipe_hash: str
    """Hash of the recipe's meaning without the horizon, as stored in checkpoints. Empty if the run is not
    whole."""
    spelling_hash: str
    """Hash of the recipe's text. Records of older versions contain this hash."""
    total_steps: int | None
    """Number of steps of the horizon; None for a script, and for a horizon that depends on the data."""
    settings_hash: str
    """Hash of the settings that nodes must share while they train together. Empty for a script, and for a
    recipe that cannot be read."""
    preparation_hash: str = ""
    """Hash of all fields that affect the prepared data. Empty for a run without ``spec.preparation``, for a
    script, and for a recipe that cannot be read."""
    refusals: tuple[Problem, ...] = ()
    """The part of ``problems`` that comes from the rules of this installation."""
    of_profile: tuple[Problem, ...] = ()
    """Problems of the profile itself."""


@dataclass(frozen=True)
class ParsedRun:
    """One TrainingRun.

    ``uid`` is empty, and ``generation`` and ``created_at`` are 0, if the object was not stored in an API
    server.
    ``created_at``: seconds since 1970.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    parsed: ParsedSpec
    created_at: float = 0.0
    is_deleting: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The object itself, with the defaults of its profile."""
    profile: RunProfile = NO_PROFILE

    @property
    def spec(self) -> Spec:
        """The manifest's ``spec``, without the typed recipe."""
        return self.parsed.spec

    @property
    def is_orphaning(self) -> bool:
        """Whether the run is being deleted without its children, for example with
        ``kubectl delete --cascade=orphan``."""
        finalizers = get_map(self.raw, "metadata").get("finalizers") or ()
        return self.is_deleting and "orphan" in finalizers

    @property
    def has_new_spec(self) -> bool:
        """Whether the last status is for an earlier generation, or refused this generation as invalid."""
        status = get_map(self.raw, "status")
        # The next version of the operator may be able to read a file that this version refused.
        is_refused = get_text(status, "reason") == Reason.INVALID_SPEC
        return is_refused or get_int(status, "observedGeneration") != self.generation

    @property
    def queue(self) -> str:
        """The Kueue LocalQueue that the run names (may be empty)."""
        return self.labels.get(LABEL_QUEUE, "")

    @property
    def claim_name(self) -> str:
        """The PVC that holds the run directory."""
        return self.spec.storage.claim_name or self.name

    @property
    def volume_path(self) -> str:
        """The run directory inside the PVC as a normalized relative path."""
        path = self.spec.storage.path or self.name
        parts = [part for part in path.split("/") if part not in ("", ".")]
        return "/".join(parts)

    def find_obstacles(self, *, has_begun: bool) -> tuple[Problem, ...]:
        """Return the problems that prevent the creation of pods, problems of the profile last.

        ``has_begun``: an earlier generation was valid. After a run has begun, some fields cannot be
        corrected. Problems of these fields are therefore ignored, because they come from rules of a later
        version of the operator. Problems by the rules of the installation are always returned, because a
        restart may have applied another profile.
        """
        if not has_begun or not self.parsed.is_whole:
            return self.parsed.problems + self.parsed.of_profile
        open_ones = (
            problem
            for problem in self.parsed.problems
            if problem not in self.parsed.refusals
            and (not problem.path.startswith(_FIXED) or problem.path == _OUT_OF_THE_VOLUME)
        )
        refusals = (
            replace(problem, remedy=_ALLOW_IMAGE) if problem.path == _IMAGE else problem
            for problem in self.parsed.refusals
        )
        return (*open_ones, *refusals, *self.parsed.of_profile)


def is_managed_here(raw: Mapping[str, Any]) -> bool:
    """Return whether this operator manages the run, and no other controller in ``spec.managedBy``."""
    return get_text(get_map(raw, "spec"), "managedBy") in ("", MANAGER)


def parse_run(
    raw: Mapping[str, Any],
    parsed: ParsedSpec | None = None,
    *,
    profile: RunProfile = NO_PROFILE,
) -> ParsedRun:
    """Return the run in ``raw``, which already contains the defaults of ``profile``.

    ``parsed``: the parsed spec, if it is known already. Raises SpecError if the envelope cannot be read.
    """
    metadata = get_map(raw, "metadata")
    found = parse_spec(raw) if parsed is None else parsed
    if found.outdated:
        # Use the current spelling, because new nodes have this version and read the spec from the ConfigMap.
        raw = {**raw, "spec": with_plain_numbers(manifest_of(raw))[0]["spec"]}
    return ParsedRun(
        name=get_text(metadata, "name"),
        namespace=get_text(metadata, "namespace") or "default",
        uid=get_text(metadata, "uid"),
        generation=get_int(metadata, "generation") or 0,
        labels=get_map(metadata, "labels"),
        annotations=get_map(metadata, "annotations"),
        parsed=found,
        created_at=parse_time(metadata.get("creationTimestamp")) or 0.0,
        is_deleting=metadata.get("deletionTimestamp") is not None,
        raw=raw,
        profile=profile,
    )


def parse_spec(
    raw: Mapping[str, Any],
    installation: Installation = NOTHING_ALLOWED,
    profile: RunProfile = NO_PROFILE,
) -> ParsedSpec:
    """Parse and check a run by the general rules and the rules of this installation.

    ``raw`` may already contain the defaults of its profile. Raises SpecError, with all problems, if the
    envelope cannot be read.
    """
    verdict = check(raw, installation, profile, is_stored=True)
    run, problems = verdict.run, verdict.problems
    raw_spec = get_map(verdict.manifest, "spec")

    training = None if run is None else run.spec.training
    # Keep the user's spelling, because records of older versions contain the hash of the text.
    raw_training = get_map(raw, "spec").get("training")
    if run is not None:
        spec = run.spec.model_copy(update={"training": None})
    else:
        # Only the nodes need the recipe. Without it, the operator can still report, suspend and delete the
        # run.
        try:
            envelope = {key: value for key, value in raw_spec.items() if key != "training"}
            spec = Spec.model_validate(without_nulls(envelope, Spec))
        except ValidationError:
            raise SpecError(problems) from None

    metrics = spec.script.metrics if spec.script else None
    if training is not None:
        metrics = training.metrics
    return ParsedSpec(
        spec=spec,
        is_typed=raw_training is not None,
        is_whole=run is not None,
        problems=problems,
        outdated=verdict.outdated,
        recovery="fresh" if run is None else run.recovery,
        metrics_port=None if metrics is None else metrics.port,
        refusals=verdict.refusals,
        of_profile=verdict.of_profile,
        settings_hash="" if run is None or training is None else settings_hash(run),
        preparation_hash=""
        if run is None or training is None or spec.preparation is None
        else preparation_hash(run),
        recipe_hash="" if run is None else config_hash(run),
        total_steps=None if training is None else steps_without_data(training),
        spelling_hash=hash_spelling(
            raw_training if isinstance(raw_training, Mapping) else None,
            spec.script,
        ),
    )


class SpecCache:
    """Caches one parsed spec per run.

    A spec is parsed again only if the uid, the generation or the profile of the run has changed.
    """

    def __init__(self, installation: Installation = NOTHING_ALLOWED) -> None:
        self._installation = installation
        self._parsed: dict[Key, tuple[str, int, object, ParsedSpec]] = {}

    def parse(self, raw: Mapping[str, Any], profile: RunProfile = NO_PROFILE) -> ParsedRun:
        """Return the run in ``raw`` with the defaults of its profile.

        Raises SpecError if the envelope cannot be read. The error is not cached.
        """
        raw = apply_defaults(raw, profile.defaults)
        metadata = get_map(raw, "metadata")
        key = get_text(metadata, "namespace"), get_text(metadata, "name")
        uid = get_text(metadata, "uid")
        generation = get_int(metadata, "generation") or 0
        # All profiles with problems have the same note, so compare their problems and defaults.
        of_profile: object = profile.note
        if profile.problems:
            of_profile = profile.problems, repr(profile.defaults)
        known = self._parsed.get(key)
        # A run that was deleted and created again has another uid but may have the same generation.
        if known is None or known[:3] != (uid, generation, of_profile) or not uid:
            parsed = parse_spec(raw, self._installation, profile)
            known = uid, generation, of_profile, parsed
            self._parsed[key] = known
        return parse_run(raw, known[3], profile=profile)

    def forget(self, key: Key) -> None:
        """Drop the spec of a run that no longer exists."""
        self._parsed.pop(key, None)
