"""Writes docs/reference/architectures.md: every causal architecture of the pinned transformers, and whether a
small model of it trains here.

Each architecture is tried with a small configuration: it is planned and built as a run does it, its loss and
gradients are computed, and later tokens must not change the logits of earlier ones. That takes about ten
minutes, so the page is not a part of ``make generate``: ``make architectures`` writes it, and a test compares
the committed page with a few architectures and with the list of the installed transformers.
"""

import argparse
import importlib.metadata
import io
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from evergrad_manifest.errors import InputError
from evergrad_manifest.training import Model
from evergrad_trainer.models.architecture import has_attention
from evergrad_trainer.models.build import build_empty_model, build_model, plan_model
from evergrad_trainer.objectives.causal_lm import causal_lm_loss
from evergrad_trainer.preflight.memory import model_facts

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "architectures.md"
TRAINS: Final = "trains"
EAGER: Final = "trains with eager attention"
WITHOUT: Final = "trains, has no attention"
REFUSED: Final = "refused"
_VOCABULARY: Final = 257
_LENGTH: Final = 16
_LAYERS: Final = 2

_SMALL: Final[dict[str, Any]] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embedding_size", "embed_dim", "dim_model"), 32
    ),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"),
        64,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "decoder_layers",
            "encoder_layers",
            "num_decoder_layers",
        ),
        _LAYERS,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
            "num_key_value_heads",
        ),
        2,
    ),
    "head_dim": 16,
    "max_position_embeddings": 64,
    "n_positions": 64,
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "num_expert_group"), 1),
    "num_experts_per_token": 2,
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("v_head_dim", "kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(
        ("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16
    ),
    **dict.fromkeys(
        ("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 2
    ),
    "rotary_dim": 8,
    "pad_token_id": 1,
    "is_decoder": True,
}
"""Values of the small configuration; each is used if an architecture has the key."""

_FULL: Final = ["full_attention"] * _LAYERS
_ROPE: Final = {"rope_type": "default", "rope_theta": 10000.0}
_MAMBA2: Final = {"mamba_n_heads": 4, "mamba_d_head": 16}
_OWN: Final[dict[str, dict[str, Any]]] = {
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "bamba": _MAMBA2,
    "codegen": {"n_head": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROPE),
    },
    "dbrx": {"attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": _FULL},
    "gptj": {"n_head": 2},
    "granitemoehybrid": _MAMBA2,
    "hy_v4": {"indexer_types": ["full", "shared"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "mimo_v2_flash": {"layer_types": _FULL, "v_head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""Values for architectures that the small configuration does not fit."""


@dataclass(frozen=True)
class Verdict:
    """Result of one architecture. ``why``: reason of a refusal, or a condition."""

    name: str
    state: str
    why: str = ""


def architectures() -> list[str]:
    """Return all causal architectures of the installed transformers, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(name: str) -> dict[str, Any]:
    """Return a configuration with a few thousand parameters; other values are the architecture's defaults."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    default = CONFIG_MAPPING[name]().to_dict()
    values = {"model_type": name, **_shrink(default)}
    text = default.get("text_config")
    if isinstance(text, Mapping):
        inner = {**_shrink(text), "vocab_size": _VOCABULARY}
        values["text_config"] = {**inner, "model_type": text.get("model_type", name)}
    return {**values, **_OWN.get(name, {})}


def _shrink(default: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in _SMALL.items() if key in default}
    if default.get("pad_token_id") is None:
        values.pop("pad_token_id", None)
    if "qk_rope_head_dim" in default and "head_dim" in default:
        # Some architectures also use this name for the rotary part.
        values["head_dim"] = _SMALL["qk_rope_head_dim"]
    # Shorten lists with one item per layer. Keep the last items, because special layers come last.
    layers = next(
        (default[key] for key in _SMALL if key in default and "layer" in key), None
    )
    for key, value in default.items():
        if isinstance(value, list) and isinstance(layers, int) and len(value) == layers:
            values[key] = value[-_LAYERS:]
    return values


def try_architecture(name: str) -> Verdict:
    """Plan, build and train a small model of one architecture."""
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
            tempfile.TemporaryDirectory() as folder,
        ):
            warnings.simplefilter("ignore")
            return _try(name, Path(folder))
    except InputError as error:
        problem = error.problems[0]
        return Verdict(name, REFUSED, _first_line(f"{problem.what}; {problem.why}"))
    except Exception as error:  # noqa: BLE001
        # The code of a transformers model may raise any error.
        return Verdict(name, REFUSED, _first_line(f"{type(error).__name__}: {error}"))


def _try(name: str, folder: Path) -> Verdict:
    settings = Model.model_validate({"config": small_config(name)})
    plan = plan_model(settings, base_directory=folder, vocab_size=_VOCABULARY)
    config = plan.require_config()
    model_facts(plan)
    model = build_model(plan, seed=1, precision="fp32")

    # A checkpoint is loaded into a model that is built without weights, so both must have the same tensors.
    empty = dict(build_empty_model(plan, precision="fp32").named_parameters())
    if empty.keys() != dict(model.named_parameters()).keys():
        return Verdict(name, REFUSED, "a model without weights has other tensors")

    torch.manual_seed(1)
    ids = torch.randint(0, 256, (2, _LENGTH + 1))
    loss = causal_lm_loss(model)(ids[:, :-1], ids[:, 1:])
    loss.backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    if not torch.isfinite(loss) or not all(bool(g.isfinite().all()) for g in gradients):
        return Verdict(name, REFUSED, "loss or gradients of a small model are not finite")
    if not gradients:
        return Verdict(name, REFUSED, "a small model has no gradients")

    if not _is_causal(model, ids[:, :-1]):
        return Verdict(name, REFUSED, "tokens attend to later ones")
    if plan.attention == "sdpa":
        return Verdict(name, TRAINS)
    return Verdict(name, EAGER if has_attention(config) else WITHOUT)


def _is_causal(model: Any, ids: torch.Tensor) -> bool:
    """Return whether the logits of earlier tokens stay the same if the last token changes."""
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 256
    model.eval()
    with torch.no_grad():
        first, second = (
            model(input_ids=one, use_cache=False).logits[:, :-1] for one in (ids, other)
        )
    return bool(torch.allclose(first, second, atol=1e-5))


def _first_line(text: str) -> str:
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= 160 else line[: line.rfind(" ", 0, 158)] + " …"


def render(verdicts: Sequence[Verdict]) -> str:
    """Return the page."""
    return "\n".join(_lines(verdicts)) + "\n"


def _lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    version = importlib.metadata.version("transformers")
    count = {
        state: sum(one.state == state for one in verdicts)
        for state in (TRAINS, EAGER, WITHOUT, REFUSED)
    }
    yield "# Architectures"
    yield ""
    yield "<!-- Written by `make architectures`; do not edit. -->"
    yield ""
    yield f"These are the {len(verdicts)} causal architectures of transformers {version}, by `model_type`:"
    yield f"{count[TRAINS]} train with SDPA attention, {count[EAGER]} with eager attention,"
    yield f"{count[WITHOUT]} have no attention and train, and {count[REFUSED]} are refused."
    yield ""
    yield "A small model of each was built as a run builds it. Its loss and gradients were finite, and later"
    yield "tokens did not change the logits of earlier ones. Larger models were not tried. Models of BERT's"
    yield "kind need `is_decoder: true` in their configuration; without it a run is refused."
    yield ""
    yield "If transformers has no SDPA attention for an architecture, the run uses eager attention."
    yield "`preflight` warns about it, and `provenance.json` records it under `kernels.attention`. Eager"
    yield "attention keeps a score for each pair of tokens, so its memory grows with the square of"
    yield "`data.sequenceLength`."
    yield ""
    yield "| `model_type` | state | reason |"
    yield "|---|---|---|"
    for one in verdicts:
        yield f"| `{one.name}` | {one.state} | {one.why} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="print these verdicts and write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only is not None:
        for name in arguments.only:
            print(try_architecture(name), flush=True)
        return 0
    verdicts = []
    for name in architectures():
        verdicts.append(try_architecture(name))
        print(f"{verdicts[-1].name}: {verdicts[-1].state} {verdicts[-1].why}", flush=True)
    PAGE.write_text(render(verdicts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
