"""JSON schemas for kubeconform: Kubernetes' own from the module that the bed is built from, the schemas of
Prometheus Operator, Argo CD and Flux from their modules, and ours from the CRD."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bed.places import REPOSITORY, cache
from bed.shell import BedError, run
from bed.toolbox import SOURCES

_RECIPE = "1"  # raise it when the conversion changes
_REFERENCE = "#/definitions/"


@dataclass(frozen=True)
class _Definitions:
    """Files of a module that define other projects' kinds. ``digest``: as computed by `go mod download`."""

    module: str
    digest: str
    files: tuple[str, ...]


_MONITORING = _Definitions(
    "github.com/prometheus-operator/prometheus-operator@v0.82.0",
    "h1:gqz+z31co8+qaEpsJKGfbrBuaMAPiAo/Z08dBIlSM+E=",
    tuple(
        f"example/prometheus-operator-crd/monitoring.coreos.com_{kind}.yaml"
        for kind in ("podmonitors", "servicemonitors", "prometheusrules")
    ),
)
_ARGO = _Definitions(
    "github.com/argoproj/argo-cd/v3@v3.0.0",
    "h1:VG3KgvjQqD7nQ/xdPnNrvSz5yLraJxVCMljdkLET46I=",
    ("manifests/crds/application-crd.yaml", "manifests/crds/applicationset-crd.yaml"),
)
_FLUX = _Definitions(
    "github.com/fluxcd/kustomize-controller@v1.6.0",
    "h1:13S+wqCQ44njSg59DNgm1qMqVkK6+0eoZs+jv4+EWCs=",
    ("config/crd/bases/kustomize.toolkit.fluxcd.io_kustomizations.yaml",),
)


def of_kubernetes() -> Path:
    """Return the folder with KIND-GROUP-VERSION.json for every kind of the pinned Kubernetes. Converts them
    once.

    Raises BedError if Go is not installed.
    """
    if shutil.which("go") is None:
        raise BedError(
            "Kubernetes' schemas come from its Go module, and there is no `go` to fetch it. "
            "Install Go 1.24 or newer."
        )
    module = json.loads(
        run(
            ["go", "mod", "download", "-json", "k8s.io/kubernetes"],
            directory=SOURCES / "kubernetes",
        )
    )
    folder = cache() / "schemas" / f"{module['Version']}-{_RECIPE}"
    if not folder.is_dir():
        definitions = json.loads(
            Path(module["Dir"], "api/openapi-spec/swagger.json").read_text()
        )["definitions"]
        scratch = folder.with_name(folder.name + ".new")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        for name, definition in definitions.items():
            for entry in definition.get("x-kubernetes-group-version-kind", ()):
                (scratch / file_name(**entry)).write_text(
                    json.dumps(_closed(name, definitions))
                )
        scratch.rename(folder)
    return folder


def of_ours(folder: Path) -> Path:
    """Write the CRD's schema into `folder`, as strict as the API server with `--validate=strict`; return the
    folder."""
    _write_crd(REPOSITORY / "crds/trainingrun.yaml", folder)
    return folder


def of_monitoring() -> Path:
    """Return the folder with schemas of the objects that the chart creates for Prometheus Operator.

    Raises BedError if Go is not installed or the module differs from the pinned one.
    """
    return _of_others(_MONITORING)


def of_gitops() -> tuple[Path, ...]:
    """Return the folders with schemas of Argo CD's Applications and Flux' Kustomizations.

    Raises BedError if Go is not installed or a module differs from the pinned one.
    """
    return _of_others(_ARGO), _of_others(_FLUX)


def _of_others(wanted: _Definitions) -> Path:
    """Return the folder with a module's schemas. Converts them once.

    Raises BedError if Go is not installed or the module differs from the pinned one.
    """
    if shutil.which("go") is None:
        raise BedError(
            f"The schemas of {wanted.module} come from its Go module, and there is no `go` to fetch it. "
            "Install Go 1.24 or newer."
        )
    path = wanted.module.partition("@")[0].removesuffix("/v3")
    name = f"{path.rpartition('/')[2]}@{wanted.module.partition('@')[2]}"
    folder = cache() / "schemas" / f"{name}-{_RECIPE}"
    if not folder.is_dir():
        # Run this outside of a module, to download only this module and none of its hundreds of dependencies.
        module = json.loads(
            run(["go", "mod", "download", "-json", wanted.module], directory=Path("/"))
        )
        if module["Sum"] != wanted.digest:
            raise BedError(
                f"{wanted.module}: is {module['Sum']}, but {wanted.digest} is pinned"
            )
        scratch = folder.with_name(folder.name + ".new")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        for file in wanted.files:
            _write_crd(Path(module["Dir"], file), scratch)
        scratch.rename(folder)
    return folder


def _write_crd(file: Path, folder: Path) -> None:
    crd = yaml.safe_load(file.read_text())["spec"]
    for version in crd["versions"]:
        schema = strict(version["schema"]["openAPIV3Schema"], is_top=True)
        name = file_name(
            group=crd["group"], version=version["name"], kind=crd["names"]["kind"]
        )
        (folder / name).write_text(json.dumps(schema))


def file_name(*, group: str, version: str, kind: str) -> str:
    """Return the name that kubeconform expects: `{{ .ResourceKind }}{{ .KindSuffix }}.json`, with only the
    first part of the group."""
    return (
        "-".join(
            part
            for part in (kind.lower(), group.partition(".")[0], version.lower())
            if part
        )
        + ".json"
    )


def strict(schema: Any, *, is_top: bool = False, is_rule: bool = False) -> Any:
    """Return the schema with unknown fields refused wherever fields are listed, converted to plain JSON
    Schema.

    ``is_rule``: a part of allOf, anyOf, oneOf or not, which lists only the fields that it restricts.
    """
    if not isinstance(schema, dict):
        return schema
    made = {
        key: value
        for key, value in schema.items()
        if key != "format" and not key.startswith("x-kubernetes-")
    }
    for key in ("properties", "definitions"):
        if key in made:
            made[key] = {
                name: strict(part, is_rule=is_rule) for name, part in made[key].items()
            }
    for key in ("items", "additionalProperties", "not"):
        if key in made:
            made[key] = strict(made[key], is_rule=is_rule or key == "not")
    for key in ("allOf", "anyOf", "oneOf"):
        if key in made:
            made[key] = [strict(part, is_rule=True) for part in made[key]]
    if is_top:
        made["properties"] = {**made["properties"], "metadata": {"type": "object"}}
    if (
        made.get("properties")
        and not is_rule
        and not schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        made.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        made = {"oneOf": [{"type": "integer"}, {"type": "string"}]}
    return made


def _closed(name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return one definition, with all definitions that it refers to, as a separate schema."""
    needed: set[str] = set()
    waiting = [name]
    while waiting:
        text = json.dumps(definitions[waiting.pop()])
        found = {part.split('"')[0] for part in text.split(_REFERENCE)[1:]} - needed
        needed |= found
        waiting += found
    made: dict[str, Any] = strict(definitions[name])
    made["definitions"] = {
        other: _relaxed(other, strict(definitions[other])) for other in sorted(needed)
    }
    return made


def _relaxed(name: str, schema: Any) -> Any:
    """Accept numbers for quantities and similar types, although the specification declares them as
    strings."""
    if name.endswith((".Quantity", ".IntOrString")):
        return {"type": ["string", "number"]}
    return schema
