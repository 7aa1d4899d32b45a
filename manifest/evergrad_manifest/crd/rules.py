"""What the fields of the envelope must satisfy together, in CEL: the loader's rules in its words, for the API server."""

from collections.abc import Mapping
from typing import Final

from evergrad_coordinator.contract import (
    OUR_MOUNTS,
    OUR_VARIABLE_PREFIXES,
    OUR_VARIABLES,
    OUR_VOLUME_PREFIX,
    PROJECTED_KINDS,
    VOLUME_KINDS,
)
from evergrad_manifest.crd.cel import DNS_SUBDOMAIN, exactly_one, number, quoted, unchanged, unchanged_but_for
from evergrad_manifest.crd.nodes import Schema, rule
from evergrad_manifest.crd.rules_training import RULES as RULES_OF_TRAINING
from evergrad_manifest.fields import fields_of
from evergrad_manifest.reading.quantities import LONGEST_RUN_NAME, RUN_NAME
from evergrad_manifest.rules_envelope import FOLDER, IMAGE
from evergrad_manifest.rules_template import VALUE_KINDS
from evergrad_manifest.training import Training

_LABEL_KEY: Final = r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"
_HIDES_OURS: Final = "^/+(volume(/.*)?|etc/+evergrad/+run(/.*)?|etc|etc/+evergrad|tmp|dev|dev/+shm)?/*$"
_LAUNCHERS: Final = ("torch.distributed.run", "torch.distributed.launch")
_CHANGED_IN_PLACE: Final = ("onNonFinite", "skipSteps")
"""Fields of ``spec.training`` that take a run past a bad step: they would be of no use in another run."""
_IMMUTABLE: Final = (
    (
        "training",
        "the recipe of a run does not change. Make a new TrainingRun, with training.initFrom for the weights",
    ),
    ("script", "the recipe of a run does not change. Make a new TrainingRun"),
    ("image", "all pods of a run have one image. Make a new TrainingRun, or set it back"),
    ("storage", "the run's state is there. Make a new TrainingRun, or set it back"),
    ("workersPerNode", "it belongs to how the run was planned. Make a new TrainingRun, or set it back"),
)


def _reserved_variable(name: str) -> str:
    prefixes = " || ".join(f"{name}.startsWith('{prefix}')" for prefix in OUR_VARIABLE_PREFIXES)
    return f"({name} in {quoted(OUR_VARIABLES)} || {prefixes})"


def _object_rules() -> tuple[Schema, ...]:
    return (
        rule(
            f"size(self.metadata.name) <= {LONGEST_RUN_NAME}",
            f"metadata.name: is too long; at most {LONGEST_RUN_NAME} characters are allowed, since pods are named after it. "
            "Shorten it.",
        ),
        rule(
            "self.metadata.name.matches('" + RUN_NAME + "')",
            "metadata.name: is not a valid name; lower-case letters, digits and '-' are allowed, a letter first and a letter or "
            "digit last. Rename it.",
        ),
    )


def _processes_rule() -> Schema:
    nodes = (
        f"(!has(self.nodes) ? 1.0 : has(self.nodes.max) ? {number('self.nodes.max')} "
        f": has(self.nodes.min) ? {number('self.nodes.min')} : 1.0)"
    )
    workers = f"(has(self.workersPerNode) ? {number('self.workersPerNode')} : 1.0)"
    whole, micro = (number(f"self.training.batching.{key}BatchSize") for key in ("global", "micro"))
    return rule(
        f"!has(self.training) || {nodes} * {workers} * {micro} <= {whole}",
        "more processes than slots: nodes.max times workersPerNode is above globalBatchSize / microBatchSize; a process needs "
        "a slot of its own. Lower nodes.max, workersPerNode or microBatchSize, or raise globalBatchSize.",
        at=".nodes",
    )


def _is_kept(key: str) -> str:
    if key != "training":
        return unchanged(key)
    return unchanged_but_for(key, (field for field in fields_of(Training) if field not in _CHANGED_IN_PLACE))


def _spec_rules() -> tuple[Schema, ...]:
    kinds = (
        rule(
            "!(has(self.training) && has(self.script))",
            "training and script are both set; a run is exactly one of them. Remove one of them.",
        ),
        rule(
            "has(self.training) || has(self.script)",
            "neither training nor script is set; a run is exactly one of them. Add training (the typed recipe), or script.",
        ),
    )
    fixed = tuple(
        rule(_is_kept(key), f"cannot be changed; {why}.", at=f".{key}", reason="FieldValueForbidden")
        for key, why in _IMMUTABLE
    )
    return (*kinds, *fixed, _processes_rule())


def _node_rules() -> tuple[Schema, ...]:
    return (
        rule(
            f"!has(self.min) || !has(self.max) || {number('self.min')} <= {number('self.max')}",
            "is below nodes.min. Raise max, or lower min.",
            at=".max",
        ),
    )


def _resource_names() -> Schema:
    return rule(
        r"self.all(name, name in ['cpu', 'memory', 'ephemeral-storage'] || name.startsWith('hugepages-') || name.contains('/'))",
        "has a name that is no resource's; it is one of cpu, memory, ephemeral-storage, or has a vendor's prefix such as "
        "nvidia.com/gpu. Rename it.",
    )


def _quantity(value: str) -> str:
    return f"quantity(string({value}))"


def _resource_rules() -> Mapping[str, tuple[Schema, ...]]:
    where = "spec.resources"
    memory = rule(
        "!('memory' in self) || quantity(string(self['memory'])).compareTo(quantity('1Mi')) >= 0",
        "memory: is too little; it is a number of bytes. Write a unit, such as 4Gi.",
    )
    device = (
        "name.contains('/') && !name.startsWith('kubernetes.io/') && !name.substring(0, name.indexOf('/')).endsWith("
        "'.kubernetes.io')"
    )
    whole = rule(
        f"self.all(name, !({device}) || {_quantity('self[name]')}.isInteger())",
        "is not a whole number of devices; devices are not shared. Write a whole number.",
    )
    limits = rule(
        "!has(self.requests) || !has(self.limits) || ['cpu', 'memory', 'ephemeral-storage'].all(name, "
        "!(name in self.requests) || !(name in self.limits) || "
        f"{_quantity('self.requests[name]')}.compareTo({_quantity('self.limits[name]')}) <= 0)",
        "a request is more than its limit. Raise the limit, or lower the request.",
        at=".requests",
    )
    devices = rule(
        f"!has(self.requests) || self.requests.all(name, !({device}) || (has(self.limits) && name in self.limits "
        "&& self.limits[name] == self.requests[name]))",
        "a device has no limit, or another one; devices are requested by their limit. Move it to limits.",
        at=".requests",
    )
    return {
        where: (limits, devices),
        f"{where}.requests": (_resource_names(), memory),
        f"{where}.limits": (_resource_names(), memory, whole),
    }


def _storage_rules() -> Mapping[str, tuple[Schema, ...]]:
    where = "spec.storage"
    name = "self.matches('{}')"
    return {
        where: (
            rule(
                "!(has(self.size) && has(self.claimName))",
                "size and claimName are both set; a run has either a new volume or an existing one. Remove one of them.",
            ),
            rule(
                "!(has(self.storageClassName) && has(self.claimName))",
                "has no meaning with claimName; an existing claim has its class already. Remove it.",
                at=".storageClassName",
            ),
            rule(
                "!(has(self.accessModes) && has(self.claimName))",
                "has no meaning with claimName; an existing claim has its access modes already. Remove it.",
                at=".accessModes",
            ),
            rule(
                "!has(self.storageClassName) || has(self.size) || has(self.claimName)",
                "missing; storageClassName asks for a new volume. Add `size: 20Gi`, or name an existing claim by claimName.",
                at=".size",
                reason="FieldValueRequired",
            ),
        ),
        f"{where}.size": (
            rule(
                "quantity(string(self)).compareTo(quantity('1Mi')) >= 0",
                "is too small; it is a number of bytes. Write a unit, such as 20Gi.",
            ),
        ),
        f"{where}.storageClassName": (_named("a storage class", name.format(DNS_SUBDOMAIN)),),
        f"{where}.claimName": (_named("a PVC", name.format(DNS_SUBDOMAIN)),),
        f"{where}.path": (
            rule(
                f"self.matches('^{FOLDER.pattern}$')",
                "is not a folder in the volume; it is relative, without . or .., of letters, digits, '-', '_', '.' and '/'. "
                "Write a path such as runs/first.",
            ),
        ),
    }


def _named(what: str, expression: str) -> Schema:
    return rule(
        expression,
        f"is not a valid name; that of {what} has lower-case letters, digits, '-' and '.'. Correct it.",
    )


def _image_rule() -> Schema:
    pattern = IMAGE.pattern.replace("\\", "\\\\")
    return rule(
        f"self.matches('^{pattern}$')",
        "is not an image; it is [registry/]name[:tag][@digest], the name in lower case. Write a reference such as "
        "registry.example.org/team/trainer:1.2.",
    )


def _template_rules() -> Mapping[str, tuple[Schema, ...]]:
    where = "spec.template"
    reserved = rule(
        "self.all(key, !key.startsWith('evergrad.dev/'))",
        "the prefix evergrad.dev/ is reserved; the operator finds its pods by these. Rename it.",
        reason="FieldValueForbidden",
    )
    keys = rule(
        f"self.all(key, key.matches('{_LABEL_KEY}'))",
        "has a key that is not valid; it is [prefix/]name of letters, digits, '-', '_' and '.'. Rename it.",
    )
    mounts = rule(
        "!has(self.volumeMounts) || self.volumeMounts.all(mount, has(self.volumes) && self.volumes.exists(volume, "
        "volume.name == mount.name))",
        "a mount names no volume of spec.template.volumes. Add the volume there, or correct the mount's name.",
        at=".volumeMounts",
    )
    name = f"self.matches('{DNS_SUBDOMAIN}')"
    return {
        where: (mounts,),
        f"{where}.labels": (reserved, keys),
        f"{where}.annotations": (reserved, keys),
        f"{where}.nodeSelector": (keys,),
        f"{where}.priorityClassName": (_named("a priority class", name),),
        f"{where}.runtimeClassName": (_named("a runtime class", name),),
        f"{where}.schedulerName": (_named("a scheduler", name),),
        **_volume_rules(f"{where}.volumes[]"),
        f"{where}.volumeMounts[]": _mount_rules(),
        **_variable_rules(f"{where}.env[]"),
    }


def _volume_rules(where: str) -> Mapping[str, tuple[Schema, ...]]:
    return {
        where: (
            rule(
                exactly_one(VOLUME_KINDS),
                f"a volume has exactly one source of {', '.join(VOLUME_KINDS)}. Name exactly one, such as `emptyDir: {{}}`.",
            ),
            rule(
                f"!self.name.startsWith('{OUR_VOLUME_PREFIX}')",
                f"the prefix {OUR_VOLUME_PREFIX} is reserved; the run's own volumes have it. Rename it.",
                at=".name",
            ),
            rule(
                "self.name.matches('^[a-z0-9]([a-z0-9-]*[a-z0-9])?$')",
                "is not a valid name; a volume's name has lower-case letters, digits and '-'. Correct it.",
                at=".name",
            ),
        ),
        f"{where}.projected.sources[]": (
            rule(
                exactly_one(PROJECTED_KINDS),
                f"a source is exactly one of {', '.join(PROJECTED_KINDS)}. Name exactly one.",
            ),
        ),
    }


def _mount_rules() -> tuple[Schema, ...]:
    return (
        rule(
            "self.mountPath.startsWith('/') && !self.mountPath.contains(':')",
            "cannot be mounted on; a mount path is absolute and has no ':'. Correct it.",
            at=".mountPath",
        ),
        rule(
            f"!self.mountPath.matches('{_HIDES_OURS}')",
            f"is reserved; the run itself has {', '.join(OUR_MOUNTS)}. Choose another place.",
            at=".mountPath",
        ),
    )


def _variable_rules(where: str) -> Mapping[str, tuple[Schema, ...]]:
    return {
        where: (
            rule(
                f"!{_reserved_variable('self.name')}",
                "is reserved; the run sets it for each of its processes. Remove it.",
                at=".name",
            ),
            rule("!self.name.contains('=')", "is not a variable's name. Correct it.", at=".name"),
            rule(
                "!(has(self.value) && has(self.valueFrom))",
                "value and valueFrom are both set; it is one of them. Remove one of them.",
            ),
        ),
        f"{where}.valueFrom": (
            rule(
                exactly_one(VALUE_KINDS),
                f"does not name one source; a variable comes from exactly one of {', '.join(VALUE_KINDS)}. Name one.",
            ),
        ),
    }


def _command_rules() -> tuple[Schema, ...]:
    launchers = quoted(_LAUNCHERS)
    torchrun = "matches('(^|/)torchrun$')"
    python = "self[0].matches('(^|/)python[0-9.]*$') && self.size() > 1"
    module = r"^[\\p{L}_][\\p{L}\\p{N}_]*(\\.[\\p{L}_][\\p{L}\\p{N}_]*)*$"
    return (
        rule(
            f"!(self[0].{torchrun} || self[0] in {launchers} || ({python} && self[1].{torchrun}) || "
            f"(self.size() > 1 && self[0] == '-m' && self[1] in {launchers}) || "
            f"({python} && self.size() > 2 && self[1] == '-m' && self[2] in {launchers}))",
            "names a launcher; the run starts its workers itself, as many as nodes and workersPerNode say. Begin with what "
            "follows the launcher's options, such as train.py.",
        ),
        rule(
            "!self[0].startsWith('-') || self[0] == '-m'",
            "begins with an option, not a program; the launcher has none here. Begin with the program, such as train.py.",
        ),
        rule(
            f"self[0] != '-m' || (self.size() > 1 && self[1].matches('{module}'))",
            "names no module; the name of one, words with dots between them, must follow -m. Write it as [-m, package.module].",
        ),
        rule(
            r"self[0].endsWith('.py') || !self[0].trim().matches('\\s') || (self[0].contains('/') && "
            r"!self[0].matches('^\\s*\\S+[.]py\\s'))",
            "the first item holds several words; no shell takes the words of a command apart. Write each word as an item.",
        ),
        rule(
            r"self[0].matches('\\S')",
            "names no program. Write a Python file, -m and a module, or an executable.",
        ),
    )


def _environment_rules() -> tuple[Schema, ...]:
    return (
        rule(
            "self.all(name, name.matches('^[A-Za-z_][A-Za-z0-9_.-]*$'))",
            "has a name that is not a variable's; letters, digits, '_', '-' and '.' are allowed, no digit first. Rename it.",
        ),
        rule(
            f"self.all(name, !{_reserved_variable('name')})",
            "has a variable that is reserved; the run sets it for each of its processes. Remove it.",
        ),
    )


def endpoint_rule() -> Schema:
    """Of a section of metrics: an endpoint that does not exist cannot stay."""
    return rule(
        f"has(self.port) || !has(self.lingerSeconds) || {number('self.lingerSeconds')} == 0.0",
        "has no meaning without metrics.port; there is no endpoint. Add metrics.port, or remove it.",
        at=".lingerSeconds",
    )


RULES: Final[Mapping[str, tuple[Schema, ...]]] = {
    "": _object_rules(),
    "spec": _spec_rules(),
    "spec.nodes": _node_rules(),
    **_resource_rules(),
    **_storage_rules(),
    "spec.image": (_image_rule(),),
    **_template_rules(),
    "spec.script.command": _command_rules(),
    "spec.script.env": _environment_rules(),
    "spec.script.metrics": (endpoint_rule(),),
    "spec.training.metrics": (endpoint_rule(),),
    **RULES_OF_TRAINING,
}
"""Path of a node (``[]`` enters a list's items) → the rules that hold there."""
