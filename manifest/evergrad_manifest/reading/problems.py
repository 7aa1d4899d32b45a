"""Converts pydantic's errors to Problems for users: the path of the field, the mistake, its reason, and the
remedy."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import Section
from evergrad_manifest.model.fields import (
    choices_of,
    fields_of,
    find_field,
    find_section,
    format_path,
    walk_fields,
)
from evergrad_manifest.model.raw import FieldPath, value_at
from evergrad_manifest.model.spelling import fold, nearest
from evergrad_manifest.reading.foreign import say_foreign
from evergrad_manifest.reading.foreign_values import (
    WHY_LENGTH_IS_WRITTEN,
    say_foreign_value,
)
from evergrad_manifest.training.latent_edit import (
    CHROMOSOME,
    EDIT_KEY,
    INTERVAL,
    WEIGHT_HASH,
)
from evergrad_manifest.training.pretrain import NAME_PATTERN
from evergrad_manifest.values.numbers import NumberError, show
from evergrad_manifest.values.quantities import DNS_LABEL, RUN_NAME

MOST_PROBLEMS: Final = 100
"""Most problems that are listed. Further problems are counted."""
_MOST_IN_WORDS: Final = 10 * MOST_PROBLEMS
"""Most findings with their own message. It is larger than the number of listed problems, because some
findings repeat another and are dropped."""

_SET_BY_CLUSTER: Final = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "managedFields",
    "selfLink",
    "ownerReferences",
)
_PATTERNS: Final = {
    RUN_NAME: "lower-case letters, digits and '-' are allowed, a letter first and a letter or digit last",
    DNS_LABEL: "lower-case letters, digits and '-' are allowed, a letter or digit first and last",
    NAME_PATTERN: "letters, digits, '-', '_' and '.' are allowed, a letter or digit first and last",
}
_FORMS: Final = {
    CHROMOSOME: (
        "is not the name of a chromosome",
        "it has neither blanks nor colons",
        "Rename it",
    ),
    INTERVAL: (
        "is not an interval",
        "it is a chromosome with its first and its last base",
        "Write it as chr1:100-200",
    ),
    EDIT_KEY: (
        "is not an edit",
        "it is a chromosome, a position, a reference and an alternate",
        "Write it as chr1:100:A:G",
    ),
    WEIGHT_HASH: (
        "is not a SHA-256",
        "it has 64 hex digits",
        "Write what sha256sum prints",
    ),
}
"""Patterns of values that are not names."""
_POSITIONS: Final = ("spec", "training", "model", "config", "max_position_embeddings")
_REFUSED_IN_TEMPLATE: Final = {
    "serviceAccount": "its name today is serviceAccountName, for an account that the installation allows",
    "automountServiceAccountToken": (
        "no token is mounted by default; use a projected volume, together with serviceAccountName"
    ),
    "restartPolicy": "the supervisor restarts workers and the operator replaces pods",
    "resources": "a pod's requests and limits belong in spec.resources",
    "containers": (
        "a pod of a run has one container, which the operator builds; initContainers end before it"
    ),
    "spec": (
        "a run's template is flat: fields of a pod's spec such as nodeSelector belong directly below "
        "spec.template"
    ),
    "metadata": "a run's template is flat: labels and annotations belong directly below spec.template",
}
# Words from other trainers and from Kubernetes, in the form that spelling.fold returns.
_OTHER_TRAINERS_WORDS: Final = {
    "lr": "learningRate",
    "eps": "epsilon",
    "wd": "weightDecay",
    "gradclip": "clipNorm",
    "seqlen": "sequenceLength",
    "maxlength": "sequenceLength",
    "args": "command",
    "entrypoint": "command",
    "environment": "env",
    "cwd": "workingDirectory",
    "workdir": "workingDirectory",
}


def problems_of(
    error: ValidationError,
    raw: Any,
    *,
    root: type[Section] = TrainingRun,
    below: FieldPath = (),
) -> list[Problem]:
    """Return every problem in ``error``. ``raw``: the validated value, from which messages quote.

    ``root``: the model that refused it. ``below``: the path of ``raw`` in the file.
    """
    # pydantic counts only valid items, so it reports a list with invalid items as too short.
    found = [
        details
        for details in error.errors(include_url=False)
        if details["type"] != "too_short"
        or len(details["input"]) < details["ctx"]["min_length"]
    ]
    told = []
    for details in found[:_MOST_IN_WORDS]:
        path: FieldPath = details["loc"]
        finding = _Finding(path, details, raw, root)
        # A later version of pydantic may report an error for which we have no text. Then use its own message.
        say = _SAYINGS.get(details["type"])
        sentence = (
            (f"{finding.shown} cannot be used", finding.message, "")
            if say is None
            else say(finding)
        )
        told.append(Problem(format_path((*below, *path)), *sentence))

    # An object of an API server may have a hundred thousand unknown keys. Describing each would take seconds,
    # in which the operator does no other work. The other problems have only their paths.
    rest = (format_path((*below, *details["loc"])) for details in found[_MOST_IN_WORDS:])
    return [
        *told,
        *(
            Problem(path, "is refused", "", "Correct the problems before it first")
            for path in rest
        ),
    ]


def at_most(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Return the first problems, each path and message once. If there are more, the last problem counts
    them."""
    unique = tuple(dict.fromkeys(problems))
    if len(unique) <= MOST_PROBLEMS:
        return unique
    rest = Problem(
        "manifest",
        f"{len(unique) - MOST_PROBLEMS} more problems are not listed",
        "",
        "Correct these first",
    )
    return (*unique[:MOST_PROBLEMS], rest)


class _Finding:
    """One error of pydantic: its path, its details, and the value as written."""

    def __init__(
        self, path: FieldPath, details: ErrorDetails, raw: Any, root: type[Section]
    ) -> None:
        self.path = path
        self.raw = raw
        self.root = root
        self.context: Mapping[str, Any] = details.get("ctx", {})
        self.message = details["msg"]
        self.value = details["input"]
        written = value_at(raw, path)
        # Use the value of the file: a parser may have converted it before it was refused.
        self.shown = show(self.value if written is None else written)
        if written is not None and written != self.value:
            self.shown += f" ({show(self.value)})"

    @property
    def key(self) -> str:
        return str(self.path[-1])


Sentence = tuple[str, str, str]
"""what, why, remedy"""


def _say_missing(finding: _Finding) -> Sentence:
    if isinstance(finding.path[-1], int):
        return (
            "this item is missing",
            f"the list needs at least {finding.path[-1] + 1}",
            "Add it",
        )
    info = find_field(finding.root, finding.path)
    choices = choices_of(info) if info is not None else ()
    if len(choices) == 1:
        return "missing", "it has no default", f"Add `{finding.key}: {choices[0]}`"
    # The first sentence of the field's description is the shortest text about the value to write.
    meaning = "" if info is None else info.description or ""
    meaning = re.split(r"(?<=[a-z)])\. |\n", meaning)[0].rstrip(".").replace("``", "`")
    if meaning[1:2].islower():
        meaning = meaning[0].lower() + meaning[1:]
    why = "it has no default"
    if finding.key == "sequenceLength":
        # Other trainers take this number from the model. Show it if the file contains it.
        positions = value_at(finding.raw, _POSITIONS)
        why = f"{why}: {WHY_LENGTH_IS_WRITTEN}"
        meaning += f", which is {positions}" if isinstance(positions, int) else ""
    return "missing", why, f"Add `{finding.key}`" + (f" ({meaning})" if meaning else "")


def _say_unknown_key(finding: _Finding) -> Sentence:
    section = find_section(finding.root, finding.path[:-1])
    known = list(fields_of(section)) if section is not None else []
    if finding.path == ("status",) or (
        finding.path[0] == "metadata" and finding.key in _SET_BY_CLUSTER
    ):
        return "is set by the cluster, not by a file", "", "Remove it"

    # A key that a pod template has and our file does not: name its replacement, or state that there is none.
    near = nearest(finding.key, known)
    if len(finding.path) == 3 and finding.path[:2] == ("spec", "template"):
        here = f"Allowed here: {', '.join(known)}"
        why = _REFUSED_IN_TEMPLATE.get(finding.key)
        if why is None and near is not None:
            return "unknown key", f"did you mean `{near}`? {here}", ""
        why = why or "only the part of a pod template listed here may be given"
        return "not allowed in a run's template", why, f"Remove it. {here}"

    # Check foreign names before similar words: `warmup_steps` would be reported as a misspelling of another
    # key. Options of a task have the user's own names, and no field of the recipe replaces them.
    is_file = finding.root is TrainingRun
    if is_file and (foreign := say_foreign(finding.path)) is not None:
        return foreign
    here = f"Known here: {', '.join(known)}"
    word = _OTHER_TRAINERS_WORDS.get(fold(finding.key))
    if near is None and word in known:
        near = word
    if near is not None:
        return "unknown key", f"did you mean `{near}`? {here}", ""
    # A known key in a wrong place is usually an indentation mistake, unless many sections have a key of that
    # name.
    places = _all_places().get(fold(finding.key), ()) if is_file else ()
    if 0 < len(places) <= 2:
        remedy = f"Check the indentation, or the path that follows --set. {here}"
        sections = " or ".join(section for section, _ in places)
        why = f"`{finding.key}` belongs in {sections}"
        if finding.key != (name := places[0][1]):
            why = f"it is written `{name}` here, and belongs in {sections}"
        return "unknown key", why, remedy
    return "unknown key", "", f"Remove it. {here}"


@cache
def _all_places() -> Mapping[str, tuple[tuple[str, str], ...]]:
    """Return the sections that have a key, each with its spelling there, by the key without case and
    underscores."""
    places: dict[str, list[tuple[str, str]]] = {}
    for field in walk_fields(TrainingRun):
        section = field.path.rpartition(".")[0] or "the top level"
        places.setdefault(fold(field.key), []).append((section, field.key))
    return {key: tuple(found) for key, found in places.items()}


def _say_not_a_mapping(finding: _Finding) -> Sentence:
    section = find_section(finding.root, finding.path)
    example = (
        f" with keys such as {', '.join(list(fields_of(section))[:3])}"
        if section is not None
        else ""
    )
    if finding.value is None:
        return (
            "is empty",
            f"a mapping is needed{example}",
            "Fill it in; check the indentation of the lines below it",
        )
    remedy = "Write `key: value` lines below it"
    if finding.path == ("spec", "nodes") and isinstance(finding.value, int):
        remedy = f"Write nodes: {{min: {finding.value}, max: {finding.value}}}"
    return f"{finding.shown} is not a mapping", f"a mapping is needed{example}", remedy


def _say_not_a_list(finding: _Finding) -> Sentence:
    if finding.value is None:
        return (
            "is empty",
            "a list is needed",
            "Write its items as lines that begin with `- `",
        )
    return (
        f"{finding.shown} is not a list",
        "",
        "Write its items as lines that begin with `- `, even if there is only one",
    )


def _say_not_a_text(finding: _Finding) -> Sentence:
    if finding.value is None:
        return "is empty", "a text is needed", "Write a text after the colon"
    if isinstance(finding.value, bool | int | float):
        kind = "true or false" if isinstance(finding.value, bool) else "a number"
        return (
            f"{finding.shown} is not a text",
            f"without quotes YAML reads it as {kind}",
            f'Put it in quotes: "{finding.shown}"',
        )
    return f"{finding.shown} is not a text", "", "Write a text"


def _say_not_a_switch(finding: _Finding) -> Sentence:
    return (
        f"{finding.shown} is neither true nor false",
        "",
        "Write true or false, without quotes",
    )


def _say_choice(finding: _Finding) -> Sentence:
    info = find_field(finding.root, finding.path)
    choices = choices_of(info) if info is not None else ()
    listed = ", ".join(choices)
    if len(choices) == 1:
        return f"{finding.shown} is not supported", "", f"Write {listed}"
    near = None
    if isinstance(finding.value, str):
        if (foreign := say_foreign_value(finding.path, finding.value)) is not None:
            return f"{finding.shown} is not one of {listed}", *foreign
        # Names in other trainers are often one of ours with a suffix: adamw_torch, constant_with_warmup.
        begun = [one for one in choices if fold(finding.value).startswith(fold(one))]
        near = nearest(finding.value, choices) or max(begun, key=len, default=None)
    return (
        f"{finding.shown} is not one of {listed}",
        "",
        f"Did you mean {near}? Write one of them" if near else "Write one of them",
    )


def _say_bound(name: str) -> Callable[[_Finding], Sentence]:
    word, why, remedy = _BOUNDS[name]

    def say(finding: _Finding) -> Sentence:
        if (foreign := say_foreign_value(finding.path, str(finding.value))) is not None:
            return f"{finding.shown} is too {word}", *foreign
        bound = f"{finding.context[name]:.15g}"
        return f"{finding.shown} is too {word}", why.format(bound), remedy.format(bound)

    return say


_BOUNDS: Final = {
    "ge": ("small", "the smallest value allowed is {}", "Use {} or more"),
    "gt": ("small", "it must be above {}", "Raise it"),
    "le": ("large", "the largest value allowed is {}", "Use {} or less"),
    "lt": ("large", "it must be below {}", "Lower it"),
}


def _say_list_length(finding: _Finding) -> Sentence:
    if "max_length" in finding.context:
        most = finding.context["max_length"]
        what = f"the list has more than {most} items"
        if (foreign := say_foreign_value(finding.path, what)) is not None:
            return what, *foreign
        return (
            what,
            f"at most {most} are allowed",
            "Remove some",
        )
    least = finding.context["min_length"]
    return (
        "the list is empty" if not finding.value else "the list is too short",
        f"at least {least} is needed",
        "Add an item",
    )


def _say_text_length(finding: _Finding) -> Sentence:
    if not finding.value:
        return "the text is empty", "", "Write a text of at least one character"
    return (
        f"{finding.shown} is too long",
        f"at most {finding.context['max_length']} characters are allowed",
        "Shorten it",
    )


def _say_pattern(finding: _Finding) -> Sentence:
    # A pattern is hard to read, so describe in words the patterns of names that users choose.
    if form := _FORMS.get(finding.context["pattern"]):
        return (f"{finding.shown} {form[0]}", *form[1:])
    rule = _PATTERNS.get(
        finding.context["pattern"], f"it must match {finding.context['pattern']}"
    )
    return f"{finding.shown} is not a valid name", rule, "Rename it"


def _say_own_words(finding: _Finding) -> Sentence:
    error = finding.context.get("error")
    if isinstance(error, NumberError):
        if (foreign := say_foreign_value(finding.path, str(finding.value))) is not None:
            return error.what, *foreign
        # Detect a duration such as 90s, 5m or 1h. Kubernetes' own fields of seconds do not accept durations
        # either.
        duration = (
            re.fullmatch(r"(\d{1,9})([smhd])", finding.value)
            if "Seconds" in finding.key and isinstance(finding.value, str)
            else None
        )
        if duration is not None:
            seconds = (
                int(duration[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[duration[2]]
            )
            return (
                f"{finding.shown} is not a number",
                "the field counts seconds and takes no unit",
                f"Write {seconds}",
            )
        return error.what, error.why, error.remedy
    return str(error), "", ""


_SAYINGS: Final[Mapping[str, Callable[[_Finding], Sentence]]] = {
    "missing": _say_missing,
    "extra_forbidden": _say_unknown_key,
    "model_type": _say_not_a_mapping,
    "model_attributes_type": _say_not_a_mapping,
    "dict_type": _say_not_a_mapping,
    "tuple_type": _say_not_a_list,
    "list_type": _say_not_a_list,
    "string_type": _say_not_a_text,
    "bool_type": _say_not_a_switch,
    "bool_parsing": _say_not_a_switch,
    "literal_error": _say_choice,
    "greater_than_equal": _say_bound("ge"),
    "greater_than": _say_bound("gt"),
    "less_than_equal": _say_bound("le"),
    "less_than": _say_bound("lt"),
    "too_short": _say_list_length,
    "too_long": _say_list_length,
    "string_too_short": _say_text_length,
    "string_too_long": _say_text_length,
    "string_pattern_mismatch": _say_pattern,
    "value_error": _say_own_words,
}
