"""Describes the contents of an image as CycloneDX, from the locks, our packages' files, and the licences of
installed packages.

The Debian packages of the base image are not listed, because each build can use another base.
"""

import re
import tomllib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from cyclonedx.factory.license import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from locks import Pin, hashes, parse_lock
from packageurl import PackageURL

_NAMESPACE = uuid.UUID("6f4b6d0e-0d0f-5d9a-9d3c-2a1f5d0c7e11")
"""Serial numbers are derived from this UUID and the content, so that equal content has an equal number."""


def describe_image(
    root: Path, *, image: str, packages: Sequence[str], locks: Sequence[str], seconds: int
) -> str:
    """Return the bill of materials of one image, as JSON.

    ``packages``: folders of our packages below ``root``. ``locks``: file names in tools/requirements/.
    ``seconds``: the document's time, in seconds since 1970. A component has the hashes of all files of its
    release that the lock allows, because the image's platform decides which of them it contains.
    """
    own = [
        tomllib.loads((root / folder / "pyproject.toml").read_text("utf-8"))["project"]
        for folder in packages
    ]
    pins = [
        pin
        for name in locks
        for pin in parse_lock((root / "tools/requirements" / name).read_text("utf-8"))
    ]
    whole = Component(
        name=image, version=own[0]["version"], type=ComponentType.CONTAINER, bom_ref=image
    )
    ours = {one["name"]: build_own_component(one) for one in own}
    theirs = [(pin, build_component(pin)) for pin in pins]

    bom = Bom(components=[*ours.values(), *(component for _, component in theirs)])
    bom.metadata.component = whole
    bom.metadata.timestamp = datetime.fromtimestamp(seconds, UTC)

    # Dependencies: the image on our packages, these on what their pyproject.toml names, the rest from the
    # locks.
    bom.register_dependency(whole, ours.values())
    by_name: dict[str, list[Component]] = {name: [one] for name, one in ours.items()}
    for pin, component in theirs:
        by_name.setdefault(pin.name, []).append(component)
    for one in own:
        bom.register_dependency(
            ours[one["name"]], find_required(one.get("dependencies", ()), by_name)
        )
    for pin, component in theirs:
        needed = [other for child, other in theirs if pin.name in child.parents]
        bom.register_dependency(component, needed)

    bom.serial_number = uuid.uuid5(_NAMESPACE, _render(bom, uuid.UUID(int=0)))
    return _render(bom, bom.serial_number)


def _render(bom: Bom, number: uuid.UUID) -> str:
    bom.serial_number = number
    text: str = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(
        indent=2
    )
    return text + "\n"


def find_required(
    wanted: Iterable[str], by_name: Mapping[str, Sequence[Component]]
) -> list[Component]:
    """Return the components that requirements such as ``aiohttp>=3.12`` name."""
    names = [re.split(r"[^A-Za-z0-9._-]", one)[0] for one in wanted]
    return [one for name in names for one in by_name.get(name, ())]


def build_own_component(project: Mapping[str, str]) -> Component:
    """Return one of our packages, from its pyproject.toml."""
    return Component(
        name=project["name"],
        version=project["version"],
        description=project["description"],
        type=ComponentType.LIBRARY,
        licenses=[LicenseFactory().make_from_string(project["license"])],
        purl=PackageURL("pypi", name=project["name"], version=project["version"]),
        bom_ref=f"{project['name']}=={project['version']}",
    )


def build_component(pin: Pin) -> Component:
    """Return one release of a lock."""
    return Component(
        name=pin.name,
        version=pin.version,
        type=ComponentType.LIBRARY,
        hashes=[
            HashType(alg=HashAlgorithm.SHA_256, content=one) for one in hashes(pin.text)
        ],
        licenses=find_licenses(pin.name, pin.version),
        purl=PackageURL("pypi", name=pin.name, version=pin.version),
        bom_ref=f"{pin.name}=={pin.version}",
    )


def find_licenses(name: str, version: str) -> list[License]:
    """Return the licences that the package names if exactly this release is installed, or else nothing."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return []
    # A local build, such as 2.13.0+cpu, has the licence of its release.
    if found.version.partition("+")[0] != version.partition("+")[0]:
        return []
    make, fields = LicenseFactory().make_from_string, found.metadata.get_all
    if expressions := fields("License-Expression"):
        return [make(expressions[0])]
    # Older packages have a line of text, which may be the whole licence, and classifiers.
    text = "".join(fields("License") or ())
    if text and len(text) < 60 and "\n" not in text:
        return [make(text)]
    classifiers = [
        one.rpartition(" :: ")[2]
        for one in fields("Classifier") or ()
        if one.startswith("License :: ") and one.count(" :: ") > 1
    ]
    return [make(classifiers[0])] if len(classifiers) == 1 else []
