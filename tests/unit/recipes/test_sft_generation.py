"""Generated completions, and the texts with which they are compared."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from evergrad_manifest.training import Generation, Runtime
from evergrad_trainer.data.batch import Stage
from evergrad_trainer.data.token_source import IGNORE_INDEX
from evergrad_trainer.data.tokenizers import BYTE_END, ByteTokenizer
from evergrad_trainer.recipes.sft.generation import (
    PARTS,
    Completions,
    PromptSource,
    last_span,
    parse_number,
    summarize,
)
from evergrad_trainer.task import Modules


class Says(nn.Module):
    """Continues with the given text after the last ``=``, and then ends the document."""

    def __init__(self, text: str, most: int = 64) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            max_position_embeddings=most, get_text_config=lambda: None
        )
        self.text = [*text.encode(), BYTE_END]
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        self.calls += 1
        logits = torch.zeros(*input_ids.shape, 257)
        for row, ids in enumerate(input_ids.tolist()):
            for at in range(ids.index(ord("=")) if ord("=") in ids else len(ids), len(ids)):
                said = min(at - ids.index(ord("=")), len(self.text) - 1)
                logits[row, at, self.text[said]] = 1
        return SimpleNamespace(logits=logits)


def completions(*, is_sharded: bool = False, **settings: Any) -> Completions:
    runtime = Runtime.model_validate({"parallelism": "fsdp2"} if is_sharded else {})
    return Completions(ByteTokenizer(), Generation.model_validate(settings), runtime)


def batch(*rows: tuple[str, str], size: int = 12) -> dict[str, torch.Tensor]:
    inputs = torch.zeros(len(rows), size, dtype=torch.int64)
    labels = torch.full((len(rows), size), IGNORE_INDEX)
    lengths = torch.zeros(len(rows), dtype=torch.int64)
    for at, (prompt, completion) in enumerate(rows):
        if not prompt:
            continue
        ids = [*f"{prompt}{completion}".encode(), BYTE_END]
        inputs[at, : len(ids) - 1] = torch.tensor(ids[:-1])
        labels[at, len(prompt) - 1 : len(ids) - 1] = torch.tensor(ids[len(prompt) :])
        lengths[at] = len(prompt)
    return {"input_ids": inputs, "labels": labels, "prompt_length": lengths}


def measure(
    model: nn.Module, made: Completions, *rows: tuple[str, str]
) -> dict[str, float]:
    loss = made(Modules(trained={"model": model}), batch(*rows), Stage({}))
    assert tuple(loss.parts) == PARTS
    return {name: float(value) for name, value in loss.parts.items()}


@pytest.mark.parametrize("changed", [{"maxNewTokens": 9}, {"stop": [";"]}])
def test_other_generation_settings_change_the_fingerprint(
    changed: dict[str, Any],
) -> None:
    """An interrupted evaluation, or its result, is not continued with other settings."""
    reader: Any = SimpleNamespace(source=SimpleNamespace(fingerprint="rows"))

    def fingerprint(**settings: Any) -> str:
        made = Generation.model_validate({"maxNewTokens": 8, **settings})
        return PromptSource(reader, sequence_length=8, settings=made).fingerprint

    assert fingerprint() == fingerprint() != fingerprint(**changed)
    assert fingerprint() != "rows"


@pytest.mark.acceptance("number-C-47")
@pytest.mark.capability("C-36", "C-47")
def test_generated_numbers_are_compared_with_the_numbers_of_the_rows() -> None:
    # Two rows have a number, which is 3 and 4 away; one has a text; one fills the batch.
    found = measure(
        Says("10"), completions(), ("1=", "13"), ("2=", "6"), ("3=", "no"), ("", "")
    )
    assert found == {"rows": 3, "exact": 0, "numbers": 2, "parsed": 2, "squared_error": 25}
    means = {name: value / 7 for name, value in found.items()}
    assert summarize(means) == {
        "exact_match": 0,
        "parse_rate": 1,
        "rmse": pytest.approx(math.sqrt(12.5)),
    }


@pytest.mark.acceptance("8d-13c:sft", "number-C-47")
@pytest.mark.capability("C-47")
def test_a_text_that_is_not_a_number_lowers_the_parse_rate_but_not_the_error() -> None:
    found = measure(Says("ten"), completions(), ("1=", "13"), ("2=", "ten"))
    assert found == {"rows": 2, "exact": 1, "numbers": 1, "parsed": 0, "squared_error": 0}
    said = summarize(found)
    assert (said["exact_match"], said["parse_rate"]) == (0.5, 0)
    assert math.isnan(said["rmse"]), "an error of nothing is no zero"


@pytest.mark.parametrize("chunk", [None, 4])
def test_the_loss_of_completions_is_chunked_if_the_training_loss_is(
    chunk: int | None,
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=257,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    widths: list[int] = []
    model.lm_head.register_forward_hook(
        lambda _module, _inputs, output: widths.append(output.shape[-1])
    )
    runtime = Runtime.model_validate({"lossChunk": chunk})
    made = Completions(
        ByteTokenizer(), Generation.model_validate({"maxNewTokens": 1}), runtime
    )
    rows = batch(("1=", "13"), ("2=", "6"))
    modules = Modules(trained={"model": model})
    with torch.no_grad():
        found = made(modules, rows, Stage({})).total
        logits = model(input_ids=rows["input_ids"]).logits
        expected = functional.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        )
    # The first call computes the loss, which gets hidden states instead of all logits.
    assert widths[0] == (257 if chunk is None else 16) and widths[-1] == 257
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_a_completion_ends_at_the_first_stop_text() -> None:
    made = completions(stop=["[/P]", "|"], maxNewTokens=8)
    model = Says("7[/P]8|9")
    assert measure(model, made, ("1=", "7[/P]"))["exact"] == 1
    # 7, the four characters after it, and the forward pass of the row's own loss.
    assert model.calls == 6
    assert made.text([*b"7|[/P]"]) == "7"


def test_a_completion_ends_at_every_id_that_an_export_names() -> None:
    ends = (ord(";"), ord("|"))
    made = Completions(
        ByteTokenizer(), Generation.model_validate({"maxNewTokens": 8}), ends=ends
    )
    assert made.generate(Says("7;8"), [[*b"1="]], torch.device("cpu")) == [[*b"7;"]]
    assert made.text([*b"7|8;"]) == "7"
    found = measure(Says("7;8"), made, ("1=", "7;"), ("2=", "7"), ("3=", "7|9"))
    assert found == {"rows": 3, "exact": 3, "numbers": 3, "parsed": 3, "squared_error": 0}

    reader: Any = SimpleNamespace(source=SimpleNamespace(fingerprint="rows"))

    def fingerprint(*ends: int) -> str:
        settings = Generation()
        source = PromptSource(reader, sequence_length=8, settings=settings, ends=ends)
        return source.fingerprint

    assert fingerprint() != fingerprint(5) != fingerprint(5, 6)


def test_the_length_of_a_completion_is_bounded_by_the_setting_and_the_model_positions() -> (
    None
):
    made = completions(maxNewTokens=3)
    device = torch.device("cpu")
    assert made.generate(Says("abcdef"), [[*b"x="]], device) == [[*b"abc"]]
    assert made.generate(Says("abcdef", most=4), [[*b"x="]], device) == [[*b"ab"]]


def test_rows_of_a_batch_end_independently() -> None:
    made = completions(maxNewTokens=5)
    rows = made.generate(Says("abc"), [[*b"x="], [*b"longer="]], torch.device("cpu"))
    assert rows == [[*b"abc", BYTE_END]] * 2


def test_ranks_that_gather_weights_together_call_the_model_equally_many_times() -> None:
    for text in ("a", "abcd"):
        model = Says(text)
        measure(model, completions(maxNewTokens=6, is_sharded=True), ("1=", "a"))
        assert model.calls == 7
    # This includes a batch without a row.
    model = Says("a")
    measure(model, completions(maxNewTokens=6, is_sharded=True), ("", ""))
    assert model.calls == 7


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-0.32", -0.32),
        (" 4.\n", 4.0),
        ("+.5e-3", 0.0005),
        ("-1e100", -1e100),
        ("1e101", None),
        ("1" * 200, None),
        ("1e999", None),
        ("nan", None),
        ("1 2", None),
        ("1_000", None),
        ("", None),
    ],
)
def test_only_a_whole_text_is_a_number(text: str, number: float | None) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("marks", "span"),
    [
        ([0, 0, 1, 1], (2, 4)),
        ([0, 1, 0, 1, 0], (3, 4)),
        ([1, 1, 1], (1, 3)),
        ([0, 1], (1, 2)),
    ],
)
def test_the_last_completion_is_generated(marks: list[int], span: tuple[int, int]) -> None:
    assert last_span(np.array(marks, dtype=np.bool_)) == span
