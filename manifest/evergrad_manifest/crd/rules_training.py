"""What the fields of a typed recipe must satisfy together, in CEL.

A field that takes fractions has no type that CEL can see (an int-or-string takes no 0.5), so arithmetic over such fields, as
that of warm-up and decay, is left to the trainer's start.
"""

from collections.abc import Mapping
from typing import Final

from evergrad_manifest.crd.cel import number
from evergrad_manifest.crd.nodes import Schema, rule
from evergrad_manifest.rules_recipe import BYTE_VOCABULARY
from evergrad_manifest.training import HELD_OUT

_HAS_EVALUATION: Final = (
    "(has(self.evaluation) && has(self.evaluation.sources) && size(self.evaluation.sources) > 0)"
)
_HAS_SPLIT: Final = "has(self.data.heldOut)"
_NAMES: Final = "self.evaluation.sources"


def _batching_rules() -> tuple[Schema, ...]:
    whole, micro = number("self.globalBatchSize"), number("self.microBatchSize")
    return (
        rule(
            f"{micro} <= {whole}",
            "is larger than globalBatchSize; a micro-batch is a part of a step. Lower it, or raise globalBatchSize.",
            at=".microBatchSize",
        ),
        rule(
            f"[{whole}].all(whole, [{micro}].all(micro, micro < 1.0 || micro > whole || int(whole) % int(micro) == 0))",
            "is not divisible by microBatchSize; a step is cut into micro-batches of equal size. Use a multiple of it.",
            at=".globalBatchSize",
        ),
    )


def _model_rules() -> Mapping[str, tuple[Schema, ...]]:
    where = "spec.training.model"
    remote = "!has(self.auto_map) && !has(self.trust_remote_code) && !has(self.custom_pipelines)"
    return {
        where: (
            rule(
                "has(self.config) || has(self.path)",
                "names no model; one of config and path is needed. Add one of them.",
            ),
            rule(
                "!(has(self.config) && has(self.path))",
                "config and path are both set; a model is exactly one of them. Remove one of them.",
            ),
        ),
        f"{where}.config": (
            rule(
                remote,
                "auto_map, trust_remote_code and custom_pipelines are not allowed; code that comes with a model is never run. "
                "Remove them; only transformers' own architectures are built.",
                reason="FieldValueForbidden",
            ),
        ),
    }


def _tokenizer_rules() -> tuple[Schema, ...]:
    is_transformers = "(has(self.type) && self.type == 'transformers')"
    return (
        rule(
            f"!{is_transformers} || has(self.path)",
            "missing; a tokenizer of type transformers is read from a local directory. Add its path.",
            at=".path",
            reason="FieldValueRequired",
        ),
        rule(
            f"{is_transformers} || !has(self.path)",
            "has no meaning with type byte; the byte tokenizer has no files. Remove it, or set type: transformers.",
            at=".path",
        ),
    )


def _source_rules() -> tuple[Schema, ...]:
    is_flat = "(has(self.type) && self.type == 'tokens')"
    return (
        rule(
            f"!({is_flat} && has(self.textField))",
            "has no meaning with type tokens. Remove it, or set type: jsonl.",
            at=".textField",
        ),
        rule(
            f"{is_flat} || !has(self.dtype)",
            "has no meaning with type jsonl. Remove it, or set type: tokens.",
            at=".dtype",
        ),
    )


def _name_rules() -> tuple[Schema, ...]:
    sources, evaluated = "self.data.sources", "self.evaluation.sources"
    folded = HELD_OUT.lower()
    once = "{list}.all(one, {list}.exists_one(other, other.name.lowerAscii() == one.name.lowerAscii()))"
    return (
        rule(
            f"{sources}.all(source, source.name.lowerAscii() != '{folded}')",
            f"{HELD_OUT} is reserved; it is the name of the evaluation set that data.heldOut makes. Rename the source.",
            at=".data.sources",
        ),
        rule(
            once.format(list=sources),
            "two sources have one name; names are unique, whatever the case of their letters. Rename one of them.",
            at=".data.sources",
        ),
        rule(
            f"!{_HAS_EVALUATION} || ({once.format(list=evaluated)} && {evaluated}.all(one, "
            f"!{sources}.exists(other, other.name.lowerAscii() == one.name.lowerAscii())))",
            "a source has the name of another; names are unique over data and evaluation, whatever the case of their letters. "
            "Rename one of them.",
            at=".evaluation.sources",
        ),
        rule(
            f"!{_HAS_SPLIT} || !{_HAS_EVALUATION} || {evaluated}.all(one, one.name.lowerAscii() != '{folded}')",
            f"{HELD_OUT} is reserved; it is the name of the evaluation set that data.heldOut makes. Rename the source.",
            at=".evaluation.sources",
        ),
    )


def _evaluation_rules() -> tuple[Schema, ...]:
    asks = "(has(self.evaluation.{0}))"
    found = [
        rule(
            f"!has(self.evaluation) || !{asks.format(key)}{extra} || {_HAS_EVALUATION} || {_HAS_SPLIT}",
            "there is nothing to evaluate on; neither evaluation.sources nor data.heldOut is set. Add data.heldOut (such as "
            "`fraction: 1%`) or a source under evaluation.sources, or remove this.",
            at=f".evaluation.{key}",
        )
        for key, extra in (("every", ""), ("atStart", " || !self.evaluation.atStart"), ("samples", ""))
    ]
    best = "has(self.checkpoint) && has(self.checkpoint.best)"
    known = (
        f"({_HAS_SPLIT} && self.checkpoint.best.metric == '{HELD_OUT}/loss') || ({_HAS_EVALUATION} && "
        "self.evaluation.sources.exists(one, one.name + '/loss' == self.checkpoint.best.metric))"
    )
    return (
        *found,
        rule(
            f"!({best}) || (has(self.evaluation) && has(self.evaluation.every))",
            "missing, and checkpoint.best needs it; without it the metric is only known at the end. Add it, such as "
            "`every: {steps: 200}`.",
            at=".evaluation",
            reason="FieldValueRequired",
        ),
        rule(
            f"!({best}) || {known}",
            "is not a metric of this run; it is the name of an evaluation set followed by /loss. Name one of evaluation.sources, "
            f"or {HELD_OUT}/loss with data.heldOut.",
            at=".checkpoint.best.metric",
        ),
        rule(
            f"!{_HAS_SPLIT} || !has(self.data.heldOut.count) || "
            "self.data.sources.all(source, !has(source.type) || source.type != 'tokens')",
            "cannot be used here; a flat file of tokens has no documents to count. Use heldOut.fraction.",
            at=".data.heldOut.count",
        ),
    )


def _stop_rule() -> Schema:
    steps = (
        f"(has(self.horizon.steps) ? {number('self.horizon.steps')} : has(self.horizon.tokens) ? "
        f"{number('self.horizon.tokens')} / {number('self.batching.globalBatchSize')} / "
        f"{number('self.data.sequenceLength')} + 1.0 : 1e18)"
    )
    exact = f"has(self.horizon.steps) ? {number('self.stop.afterStep')} <= {steps} : {number('self.stop.afterStep')} < {steps}"
    return rule(
        f"!has(self.stop) || !has(self.stop.afterStep) || ({exact})",
        "is beyond the horizon; the run ends before that step. Lower it, remove it, or lengthen the horizon.",
        at=".stop.afterStep",
    )


def _other_rules() -> tuple[Schema, ...]:
    config = "has(self.model.config) && has(self.model.config.vocab_size)"
    reads_bytes = (
        "(!has(self.tokenizer) || !has(self.tokenizer.type) || self.tokenizer.type == 'byte') && "
        "self.data.sources.exists(source, !has(source.type) || source.type == 'jsonl')"
    )
    sharded = (
        "has(self.runtime) && has(self.runtime.parallelism) && self.runtime.parallelism != 'dataParallel'"
    )
    return (
        rule(
            "!has(self.model.path) || has(self.tokenizer)",
            "is a model with a tokenizer of its own, and would be trained on the ids of bytes. Add training.tokenizer with its "
            "path, or tokenizer: {type: byte} if bytes are meant.",
            at=".model.path",
        ),
        rule(
            f"!({config}) || self.model.config.vocab_size >= {BYTE_VOCABULARY} || !({reads_bytes})",
            f"is too small; the byte tokenizer has {BYTE_VOCABULARY} ids. Raise it to {BYTE_VOCABULARY}, or leave it out.",
            at=".model.config.vocab_size",
        ),
        rule(
            "!has(self.reproducibility) || !has(self.reproducibility.elastic) || self.reproducibility.elastic != 'exact' || "
            f"!({sharded})",
            "exact cannot be combined with a runtime.parallelism other than dataParallel; sums that do not depend on order need "
            "the whole gradient in one place. Set runtime.parallelism: dataParallel, or elastic: fast.",
            at=".reproducibility.elastic",
        ),
    )


RULES: Final[Mapping[str, tuple[Schema, ...]]] = {
    "spec.training": (*_name_rules(), *_evaluation_rules(), _stop_rule(), *_other_rules()),
    "spec.training.batching": _batching_rules(),
    **_model_rules(),
    "spec.training.tokenizer": _tokenizer_rules(),
    "spec.training.data.sources[]": _source_rules(),
    "spec.training.evaluation.sources[]": _source_rules(),
}
