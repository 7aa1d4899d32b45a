"""Lists the containers of a run's pods, as its file describes them, for all rules. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.raw import FieldPath, value_at

_SPEC: Final = ("spec",)
_BESIDE: Final = (("spec", "preparation"), ("spec", "evaluation"))
_INIT: Final = ("spec", "template", "initContainers")


@dataclass(frozen=True)
class Container:
    """One container of a pod, or the only container of a kind of pod.

    ``path``: the section that describes it. ``raw``: its values from the file.
    """

    path: FieldPath
    raw: Mapping[str, Any]

    @property
    def image(self) -> str:
        """The image that the container names; empty for the image of the run."""
        image = self.raw.get("image")
        return image if isinstance(image, str) else ""

    def path_of(self, *keys: str | int) -> str:
        """Return the path of one of its fields, as messages name it."""
        return format_path((*self.path, *keys))

    def asked(self) -> Iterator[tuple[str, str]]:
        """Yield the names of the resources that the container requests, each with its path."""
        for kind in ("requests", "limits"):
            values = value_at(self.raw, ("resources", kind))
            for name in values if isinstance(values, Mapping) else ():
                yield str(name), self.path_of("resources", kind, str(name))


def containers_of(run: Any) -> Iterator[Container]:
    """Yield all containers of the pods of ``run``, an object with ``spec``.

    These are the containers of the nodes, of the pods that prepare and evaluate, and the init containers,
    which all of these pods have. Values of a wrong type are skipped.
    """
    for path in (_SPEC, *_BESIDE):
        section = value_at(run, path)
        if isinstance(section, Mapping):
            yield Container(path, section)
    found = value_at(run, _INIT)
    for index, item in enumerate(found if isinstance(found, list | tuple) else ()):
        if isinstance(item, Mapping):
            yield Container((*_INIT, index), item)
