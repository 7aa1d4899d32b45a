"""Manifests with the verdicts of ``evergrad validate`` and ``kubectl apply``, as one table.

Each row changes a valid run. Values are YAML text as in a file: `y` here is an unquoted y in the file.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

import yaml

Changes = Mapping[str, str]
"""Dotted path → text of the value in the file."""

_SPREAD: Final = "topologyKey: zone, whenUnsatisfiable: ScheduleAnyway"
_FILE: Final = "configMap: {name: a, defaultMode: %s}"
_VOLUMES: Final = "spec.template.volumes"
_SPREADS: Final = "spec.template.topologySpreadConstraints"

ACCEPTED: Final[Mapping[str, Changes]] = {
    "nothing is changed": {},
    "y for a switch": {"spec.suspend": "y"},
    "n for a switch": {"spec.suspend": "n"},
    "OFF for a switch": {"spec.suspend": "OFF"},
    "octal, hexadecimal and binary integers": {
        "spec.nodes": "{min: 0o1, max: 0X2}",
        "spec.workersPerNode": "0b1",
        "spec.activeDeadlineSeconds": "0X80",
    },
    "underscores in integers": {
        "spec.activeDeadlineSeconds": "1_000",
        "spec.training.horizon.steps": "1_0_0",
    },
    "whole numbers that are written as floats": {
        "spec.nodes": "{min: 1.0, max: 2.0}",
        "spec.activeDeadlineSeconds": "1e3",
        "spec.training.horizon.steps": "1e2",
    },
    "floats of several forms": {
        "spec.training.optimizer.learningRate": ".1e-2",
        "spec.training.optimizer.weightDecay": "0_0.0_1",
        "spec.training.model.config.rope_theta": "10000.0",
        "spec.training.model.config.rms_norm_eps": "1e-06",
    },
    "texts of numbers": {
        "spec.training.optimizer.learningRate": '"1e-3"',
        "spec.training.schedule.warmup": "5%",
        "spec.training.horizon": "{tokens: 1M}",
    },
    "texts that look like dates and times": {
        "metadata.annotations": "{date: 2026-01-01, time: 12:30, moment: 2026-01-01T00:00:00Z}",
    },
    "words in quotes": {
        "metadata.labels": "{a: 'no', b: \"0o17\", c: '1_000'}",
        "spec.template.env": "[{name: A, value: 'y'}, {name: B, value: \"0X80\"}]",
    },
    "the values of a free mapping": {
        "spec.training.model.config.use_cache": "n",
        "spec.training.model.config.vocab_size": "0X200",
    },
    "nulls of what may be left out": {
        "spec.workersPerNode": "~",
        "spec.template": "{volumes: [{name: a, emptyDir: {medium: null}, configMap: null}]}",
    },
    "octal modes of files": {
        _VOLUMES: f"[{{name: a, {_FILE % '0o644'}}}, {{name: b, {_FILE % '0644'}}}]",
    },
    "the largest mode and a float": {
        _VOLUMES: f"[{{name: a, {_FILE % '511'}}}, {{name: b, {_FILE % '420.0'}}}]",
    },
    "sizes of scratch space": {
        _VOLUMES: "[{name: a, emptyDir: {sizeLimit: 1e9}}, {name: b, emptyDir: {sizeLimit: 10Gi}}]",
    },
    "the largest integers of 32 and 64 bits": {
        _SPREADS: f"[{{maxSkew: 2147483647, minDomains: 0x7FFFFFFF, {_SPREAD}}}]",
        "spec.template.tolerations": "[{key: a, tolerationSeconds: 9223372036854775807}]",
    },
    "quantities": {
        "spec.resources": "{requests: {cpu: 1, memory: 1e9}, limits: {cpu: '1.5', memory: 4Gi}}",
    },
    "the longest name": {"metadata.name": "a" * 45},
    "a label's longest value": {"spec.template.labels": f"{{a: {'b' * 63}}}"},
    "a merged mapping": {
        "spec.resources": "{requests: &same {cpu: 1}, limits: {<<: *same, memory: 1Gi}}",
    },
}
"""Both accept it, and the server stores the values that Evergrad reads."""

REFUSED: Final[Mapping[str, Changes]] = {
    "a word in quotes for a switch": {"spec.suspend": "'y'"},
    "a number for a switch": {"spec.suspend": "1"},
    "a number in quotes for an integer": {"spec.nodes": "{min: '1', max: 2}"},
    "a number that is not whole": {"spec.nodes": "{min: 1.5, max: 2}"},
    "more nodes than the most": {"spec.nodes": "{min: 1, max: 2000}"},
    "fewer nodes than the least": {"spec.nodes": "{min: 2, max: 1}"},
    "seconds beyond 32 bits": {"spec.ttlSecondsAfterFinished": "0x80000000"},
    "a unit on seconds": {"spec.ttlSecondsAfterFinished": "1h"},
    "not a number": {"spec.training.optimizer.learningRate": ".nan"},
    "n for a label": {"metadata.labels": "{a: n}"},
    "an octal number for a label of pods": {"spec.template.labels": "{a: 0o17}"},
    "a number with underscores for a label of hosts": {
        "spec.template.nodeSelector": "{a: 1_000}"
    },
    "y for a variable": {"spec.template.env": "[{name: A, value: y}]"},
    "a mode beyond its bound": {_VOLUMES: f"[{{name: a, {_FILE % '0o1000'}}}]"},
    "a mode in quotes": {_VOLUMES: f"[{{name: a, {_FILE % repr('0644')}}}]"},
    "a number for a name in a volume": {_VOLUMES: "[{name: a, configMap: {name: 5}}]"},
    "a size that is not whole": {_VOLUMES: "[{name: a, emptyDir: {sizeLimit: 1.5}}]"},
    "a size with an unknown unit": {_VOLUMES: "[{name: a, emptyDir: {sizeLimit: 10GB}}]"},
    "a volume without a source": {_VOLUMES: "[{name: a, emptyDir: null}]"},
    "an unknown key in a volume": {_VOLUMES: "[{name: a, configMap: {nam: a}}]"},
    "two volumes of one name": {
        _VOLUMES: "[{name: a, emptyDir: {}}, {name: a, emptyDir: {}}]"
    },
    "maxSkew beyond 32 bits": {_SPREADS: f"[{{maxSkew: 3000000000, {_SPREAD}}}]"},
    "no maxSkew": {_SPREADS: f"[{{{_SPREAD}}}]"},
    "minDomains beyond 32 bits": {
        _SPREADS: f"[{{maxSkew: 1, minDomains: 2147483648, {_SPREAD}}}]"
    },
    "an unknown key of the recipe": {"spec.training.optimizer.learningrate": "1"},
    "an unknown key at the top": {"specs": "{}"},
    "a name that is too long": {"metadata.name": "a" * 46},
    "a name with capitals": {"metadata.name": "Mine"},
    "a label's value that is too long": {"metadata.labels": f"{{a: {'b' * 64}}}"},
    "a nonce that is too long": {"spec.restartNonce": "a" * 65},
    "a class that is too long": {"spec.template.priorityClassName": "a" * 5000},
    "more labels of pods than the most": {
        "spec.template.labels": json.dumps({f"key{number}": "a" for number in range(129)})
    },
    "more variables than the most": {
        "spec.template.env": json.dumps([{"name": f"A{number}"} for number in range(257)])
    },
    "annotations that are too large": {
        "metadata.annotations": json.dumps(
            {f"a{number}": "b" * 4096 for number in range(64)}
        )
    },
    "an optimizer that does not exist": {"spec.training.optimizer.type": "adamz"},
    "a policy that does not exist": {"spec.imagePullPolicy": "Sometimes"},
    "a word of affinity that does not exist": {
        _SPREADS: "[{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: never}]"
    },
    "a recipe and a script": {"spec.script": "{command: [train.py]}"},
    "two models": {"spec.training.model.path": "/model"},
    "two lengths": {"spec.training.horizon": "{steps: 1, tokens: 1M}"},
    "a volume and a claim": {"spec.storage": "{size: 1Gi, claimName: mine}"},
}
"""Both refuse it."""

STRICTER: Final[Mapping[str, Changes]] = {
    "a leading zero outside of the template": {"spec.activeDeadlineSeconds": "010"},
    "a key that kubectl calls true": {"spec.template.labels": "{y: a}"},
    "a key that is given twice": {"spec.nodes": "{min: 1, min: 2}"},
    "a null in a map of texts": {"spec.template.labels": "{a: null}"},
    "finalizers": {"metadata.finalizers": "[example.com/mine]"},
}
"""``validate`` deliberately refuses values that kubectl accepts. Such a value is nearly always a slip, and no
file of a run needs it.

docs/reference/trainingrun.md lists them.
"""


def write_manifest(base: Mapping[str, Any], changes: Changes) -> str:
    """Return the text of ``base`` with ``changes``, each in the given spelling."""
    # A placeholder stands for each text while the rest is written, so that no value is written in another
    # spelling.
    words = {f"word-{number}-here": text for number, text in enumerate(changes.values())}
    tree: dict[str, Any] = json.loads(json.dumps(base))
    for path, word in zip(changes, words, strict=True):
        *parents, key = path.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[key] = word
    text = yaml.safe_dump(tree, sort_keys=False, width=10**6)
    for word, raw in words.items():
        assert text.count(word) == 1
        text = text.replace(word, raw)
    return text


def with_defaults(schema: Mapping[str, Any], value: Any) -> Any:
    """Return ``value`` with the defaults of a structural schema."""
    if isinstance(value, list):
        return [with_defaults(schema.get("items", {}), one) for one in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", {})
    filled = {key: part["default"] for key, part in properties.items() if "default" in part}
    return {
        **filled,
        **{
            key: with_defaults(properties.get(key, others), item)
            for key, item in value.items()
        },
    }
