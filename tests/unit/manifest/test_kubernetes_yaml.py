"""A file has the same meaning here as for kubectl: scalar values, Kubernetes' own structures, and messages
with the file's words."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_scalars import TABLE, ask_kubernetes, scalars

from bed import toolbox
from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.reading.document import parse_document
from evergrad_manifest.reading.loader import load_manifest
from evergrad_manifest.values.numbers import with_whole_numbers

BASE = Path(__file__).parent / "base_manifest.yaml"
ROWS: list[dict[str, Any]] = json.loads(TABLE.read_text())
DELIBERATE = re.compile("begins with 0|too large|too small|is not a finite number")
"""Values that are refused here although Kubernetes accepts them: a number has such a form only by mistake."""


def test_the_table_has_every_scalar_of_the_list() -> None:
    assert [row["text"] for row in ROWS] == [f"a: {text}\n" for text in scalars()]


def test_the_table_matches_the_kubernetes_parser() -> None:
    if reason := toolbox.unavailable("kubeyaml"):
        pytest.skip(reason)
    assert ask_kubernetes() == ROWS


@pytest.mark.parametrize("row", ROWS, ids=[row["text"].strip() for row in ROWS])
def test_a_scalar_has_the_value_that_an_api_server_would_store(row: dict[str, Any]) -> None:
    document = parse_document(row["text"], label="file")
    if "error" in row:
        assert document.problems
        return
    if document.problems:
        (problem,) = document.problems
        assert DELIBERATE.search(str(problem)), problem
        return
    found = with_whole_numbers(document.value)
    # As JSON: for Python 1, 1.0 and true are equal.
    assert json.dumps(found) == json.dumps(row["value"])


def test_only_the_known_few_scalars_are_refused() -> None:
    refused = {
        row["text"].removeprefix("a: ").strip()
        for row in ROWS
        if "error" not in row and parse_document(row["text"], label="file").problems
    }
    zeros = {text for text in refused if re.fullmatch("[-+]?0[0-9_]+", text)}
    assert {"010", "08", "-0777", "0_10"} <= zeros
    assert refused - zeros == {"1e400", "-1e400", "1e-400", ".1e400"}


def refusal(tmp_path: Path, change: str) -> str:
    """Return the message for the base manifest with ``change``, YAML below ``spec``, as an overlay."""
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(f"spec:\n{change}")
    with pytest.raises(ConfigurationError) as raised:
        load_manifest(BASE, overlays=[overlay])
    return "\n".join(map(str, raised.value.problems)).replace(f"{overlay} ", "")


@pytest.mark.parametrize("text", ["1e3", "no", "y", "0o17", "1_000", "10000.0", "Off"])
def test_the_remedy_is_the_text_in_the_file(tmp_path: Path, text: str) -> None:
    for change, where in (
        (
            f"  template: {{env: [{{name: A, value: {text}}}]}}\n",
            "spec.template.env[0].value",
        ),
        (f"  template: {{labels: {{a: {text}}}}}\n", "spec.template.labels.a"),
        (f"  template: {{nodeSelector: {{a: {text}}}}}\n", "spec.template.nodeSelector.a"),
        (
            f"  template: {{initContainers: [{{name: a, args: [a, {text}]}}]}}\n",
            "spec.template.initContainers[0].args[1]",
        ),
        (
            f"  template: {{tolerations: [{{key: a, value: {text}}}]}}\n",
            "spec.template.tolerations[0].value",
        ),
    ):
        message = refusal(tmp_path, change)
        assert f"{where}: {text} is not a text (line 2)" in message
        assert f'Put it in quotes: "{text}"' in message
    with pytest.raises(ConfigurationError) as raised:
        load_manifest(BASE, overrides=[f"metadata.name={text}"])
    assert f"{text} is not a text (--set); " in str(raised.value)
    assert f'Put it in quotes: "{text}"' in str(raised.value)


def test_a_key_that_kubernetes_parses_as_another_type_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, "  template: {labels: {y: a}}\n")
    assert "the key 'y' is not a text (line 2); YAML reads it as true or false" in message


STRUCTURES = [
    (
        "volumes: [{name: a, configMap: {name: a, defaultMode: 3000000000}}]",
        "volumes[0].configMap.defaultMode",
        "3000000000 is too large",
    ),
    (
        'volumes: [{name: a, configMap: {name: a, defaultMode: "0644"}}]',
        "volumes[0].configMap.defaultMode",
        "'0644' is not a whole number",
    ),
    (
        "volumes: [{name: a, secret: {secretName: a, items: [{key: k, path: p, mode: 512}]}}]",
        "volumes[0].secret.items[0].mode",
        "512 is too large",
    ),
    (
        "volumes: [{name: a, secret: {secretName: a, items: [{key: k}]}}]",
        "volumes[0].secret.items[0].path",
        "missing",
    ),
    (
        "volumes: [{name: a, configMap: {nam: a}}]",
        "volumes[0].configMap.nam",
        "unknown key",
    ),
    (
        "volumes: [{name: a, configMap: {name: 5}}]",
        "volumes[0].configMap.name",
        "5 is not a text",
    ),
    (
        "volumes: [{name: a, emptyDir: {sizeLimit: 1.5}}]",
        "volumes[0].emptyDir.sizeLimit",
        "1.5 is neither a whole number nor a text",
    ),
    (
        "volumes: [{name: a, emptyDir: {sizeLimit: 10GB}}]",
        "volumes[0].emptyDir.sizeLimit",
        "'10GB' is not a quantity",
    ),
    (
        "volumes: [{name: a, emptyDir: null}]",
        "volumes[0]",
        "has no source",
    ),
    (
        'volumes: [{name: a, emptyDir: {sizeLimit: "10Gi\\n"}}]',
        "volumes[0].emptyDir.sizeLimit",
        "'10Gi\\n' is not a quantity",
    ),
    (
        "volumes: [{name: a, emptyDir: []}]",
        "volumes[0].emptyDir",
        "a list is not a mapping",
    ),
    (
        "volumes: [{name: a, persistentVolumeClaim: {claimName: a, readOnly: 'yes'}}]",
        "volumes[0].persistentVolumeClaim.readOnly",
        "'yes' is neither true nor false",
    ),
    (
        "volumes: [{name: a, persistentVolumeClaim: {}}]",
        "volumes[0].persistentVolumeClaim.claimName",
        "missing",
    ),
    (
        "volumes: [{name: a, projected: {sources: [{downwardAPI: {items: [{path: p, fieldRef: {}}]}}]}}]",
        "volumes[0].projected.sources[0].downwardAPI.items[0].fieldRef.fieldPath",
        "missing",
    ),
    (
        "volumes: [{name: a, projected: {sources: {}}}]",
        "volumes[0].projected.sources",
        "a mapping is not a list",
    ),
    (
        "volumes: [{name: a, ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteOnce]}}}}]",
        "volumes[0].ephemeral.volumeClaimTemplate.spec.resources",
        "missing",
    ),
    ("tolerations: [{key: 5}]", "tolerations[0].key", "5 is not a text"),
    (
        'tolerations: [{key: a, tolerationSeconds: "5"}]',
        "tolerations[0].tolerationSeconds",
        "'5' is not a whole number",
    ),
    (
        "tolerations: [{key: a, tolerationSeconds: 9223372036854775808}]",
        "tolerations[0].tolerationSeconds",
        "9223372036854775808 is too large",
    ),
    (
        "topologySpreadConstraints: [{maxSkew: 3000000000, topologyKey: a, whenUnsatisfiable: DoNotSchedule}]",
        "topologySpreadConstraints[0].maxSkew",
        "3000000000 is too large",
    ),
    (
        "topologySpreadConstraints: [{maxSkew: 1, minDomains: 2147483648, topologyKey: a, whenUnsatisfiable: DoNotSchedule}]",
        "topologySpreadConstraints[0].minDomains",
        "2147483648 is too large",
    ),
    (
        "topologySpreadConstraints: [{maxSkew: 0, topologyKey: a, whenUnsatisfiable: DoNotSchedule}]",
        "topologySpreadConstraints[0].maxSkew",
        "0 is too small",
    ),
    (
        "topologySpreadConstraints: [{maxSkew: 1, topologyKey: a, whenUnsatisfiable: ScheduleAnyway}, {maxSkew: 2, topologyKey: a, whenUnsatisfiable: ScheduleAnyway}]",
        "topologySpreadConstraints[1]",
        "topologyKey and whenUnsatisfiable are those of",
    ),
    (
        "topologySpreadConstraints: [{maxSkew: 1, topologyKey: a, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabel: {}}}]",
        "topologySpreadConstraints[0].labelSelector.matchLabel",
        "unknown key",
    ),
    (
        "affinity: {nodeAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 101, preference: {}}]}}",
        "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight",
        "101 is too large",
    ),
    (
        "affinity: {podAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{}]}}",
        "affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey",
        "missing",
    ),
    (
        "affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: a, operator: in}]}]}}}",
        "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].operator",
        "'in' is not one of In, NotIn",
    ),
    (
        "env: [{name: A, valueFrom: {resourceFieldRef: {resource: limits.cpu, divisor: 1.5}}}]",
        "env[0].valueFrom.resourceFieldRef.divisor",
        "1.5 is neither a whole number nor a text",
    ),
    (
        "volumes: [{name: a, emptyDir: {}}]\n    volumeMounts: [{name: a, mountPath: /a, subPath: 5}]",
        "volumeMounts[0].subPath",
        "5 is not a text",
    ),
    ("imagePullSecrets: [{name: 5}]", "imagePullSecrets[0].name", "5 is not a text"),
]


@pytest.mark.parametrize(
    ("change", "where", "what"), STRUCTURES, ids=[one[1] for one in STRUCTURES]
)
def test_a_pod_template_that_an_api_server_refuses_is_refused_once_with_its_path(
    tmp_path: Path, change: str, where: str, what: str
) -> None:
    message = refusal(tmp_path, f"  template:\n    {change}\n")
    (line,) = message.splitlines()
    assert line.startswith(f"spec.template.{where}: {what}")


@pytest.mark.parametrize(
    "change",
    [
        "volumes: [{name: a, configMap: {name: a, defaultMode: 0o644}}]",
        "volumes: [{name: a, configMap: {name: a, defaultMode: 0644}}]",
        "volumes: [{name: a, configMap: {name: a, defaultMode: 420.0, optional: y}}]",
        "volumes: [{name: a, emptyDir: {sizeLimit: 1e9, medium: null}}]",
        "volumes: [{name: a, emptyDir: {}, configMap: null}]",
        "tolerations: [{key: a, tolerationSeconds: 9223372036854775807}]",
    ],
)
def test_a_pod_template_that_an_api_server_accepts_is_accepted(
    tmp_path: Path, change: str
) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(f"spec:\n  template:\n    {change}\n")
    loaded = load_manifest(BASE, overlays=[overlay])
    volumes = loaded.run.spec.template.volumes
    if "defaultMode" in change:
        assert volumes[0]["configMap"]["defaultMode"] == 420


def test_each_32_bit_field_of_the_definition_has_a_maximum() -> None:
    definition = yaml.safe_load(
        (Path(__file__).parents[3] / "crds/trainingrun.yaml").read_text()
    )
    found = list(fields_of_32_bits(definition))
    assert len(found) > 20
    assert [path for path, one in found if one.get("maximum", 2**31) > 2**31 - 1] == []


def fields_of_32_bits(value: Any, path: str = "") -> Any:
    if isinstance(value, dict):
        if value.get("format") == "int32":
            yield path, value
        for key, item in value.items():
            yield from fields_of_32_bits(item, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from fields_of_32_bits(item, path)
