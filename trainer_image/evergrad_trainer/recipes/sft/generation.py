"""Generates completions from the prompts of rows, and compares them with the completions of the rows."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from evergrad_manifest.training import Generation, Runtime
from evergrad_trainer.data.row_source import RowReader
from evergrad_trainer.data.token_source import IGNORE_INDEX, INPUT_IDS, LABELS
from evergrad_trainer.data.tokenizers import TextTokenizer
from evergrad_trainer.models.compilation import should_compile
from evergrad_trainer.models.decoding import decode
from evergrad_trainer.objectives.causal_lm import causal_lm_loss
from evergrad_trainer.task import Loss, Modules, Rows, Stage, Tensors

PROMPT_LENGTH: Final = "prompt_length"
METRICS: Final = {
    "exact_match": "Share of rows whose generated completion is the row's own, white space around it aside.",
    "parse_rate": "Share of generated completions that are a number, of the rows whose own is one.",
    "rmse": "Root of the mean squared error of those numbers; read it beside the parse rate.",
}
PARTS: Final = ("rows", "exact", "numbers", "parsed", "squared_error")
_LARGEST: Final = 1e100
"""A larger number is a run of digits rather than a value, and its square would overflow."""
_NUMBER: Final = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class PromptSource:
    """Reads one row per item: ``input_ids`` and ``labels`` [items, S], and ``prompt_length`` [items].

    Only the tokens of the row's last completion have labels. ``prompt_length`` is the number of tokens before
    it.
    """

    fill: Mapping[str, int] = {INPUT_IDS: 0, LABELS: IGNORE_INDEX, PROMPT_LENGTH: 0}

    def __init__(
        self,
        reader: RowReader,
        *,
        sequence_length: int,
        settings: Generation,
        ends: Sequence[int] = (),
    ) -> None:
        """``settings``: how completions are generated. ``ends``: ids that end a completion in addition to the
        end of a document. Both are part of the fingerprint, which decides which results may be added."""
        parts = [reader.source.fingerprint, settings.model_dump(mode="json")]
        # Without other ends, the fingerprint is the same as in older versions, which had none.
        said = json.dumps([*parts, *([list(ends)] if ends else [])])
        self.fingerprint = hashlib.sha256(said.encode()).hexdigest()[:16]
        self._reader = reader
        self._length = sequence_length

    def __len__(self) -> int:
        return len(self._reader)

    def read(self, items: Sequence[int]) -> Rows:
        """Read rows. Raises IndexError, and DataError if a file can no longer be read."""
        shape = (len(items), self._length)
        inputs = np.zeros(shape, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        prompts = np.zeros(len(items), dtype=np.int64)
        for at, item in enumerate(items):
            row = self._reader.read(item)
            size = len(row.ids) - 1
            begin, end = last_span(row.marks)
            inputs[at, :size] = row.ids[:-1]
            labels[at, begin - 1 : end - 1] = row.ids[begin:end]
            prompts[at] = begin
        tensors = {INPUT_IDS: inputs, LABELS: labels, PROMPT_LENGTH: prompts}
        return Rows(
            {name: torch.from_numpy(one) for name, one in tensors.items()},
            weight=int((labels != IGNORE_INDEX).sum()),
        )

    def describe(self, item: int) -> str:
        """Return file and line of the row."""
        return self._reader.describe([item])


def last_span(marks: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[int, int]:
    """Return [begin, end) of the last completion in tokens. The row's first token is never a part of it."""
    learned = np.flatnonzero(marks)
    end = int(learned[-1]) + 1
    # The completion begins after the last unmarked token, or at the second token if all are marked.
    others = np.flatnonzero(~marks[:end])
    return (max(1, int(others[-1]) + 1) if len(others) else 1), end


@dataclass(frozen=True)
class Completions:
    """Measures greedy completions of the rows of a micro-batch.

    ``runtime``: how the model is sharded and compiled; by default neither. ``ends``: ids that end a
    completion in addition to the end of a document.
    """

    tokenizer: TextTokenizer
    settings: Generation
    runtime: Runtime | None = None
    ends: tuple[int, ...] = ()

    @property
    def is_sharded(self) -> bool:
        """Whether all ranks must call the model equally often, because they gather its weights together."""
        return self.runtime is not None and self.runtime.parallelism == "fsdp2"

    @property
    def _ends(self) -> tuple[int, ...]:
        return (self.tokenizer.end_of_document, *self.ends)

    def __call__(self, modules: Modules, batch: Tensors, stage: Stage) -> Loss:
        """Return sums over the rows: the losses of the tokens in the rows' own completions, and PARTS."""
        model = modules.trained["model"]
        inputs, labels, lengths = batch[INPUT_IDS], batch[LABELS], batch[PROMPT_LENGTH]
        # Use chunks as in training, because the logits of a whole micro-batch may not fit.
        chunk_tokens = None if self.runtime is None else self.runtime.loss_chunk
        total = causal_lm_loss(model, chunk_tokens=chunk_tokens)(inputs, labels)
        # Rows that pad a batch have no prompt.
        prompts = [
            row[:length].tolist() for row, length in zip(inputs, lengths, strict=True)
        ]
        rows = [at for at, prompt in enumerate(prompts) if prompt]
        given = [prompts[at] for at in rows]
        # Collective: ranks gather the weights together, so a rank without rows generates for a dummy prompt.
        if not given and self.is_sharded:
            given = [[0]]
        generated = self.generate(model, given, inputs.device)

        sums = dict.fromkeys(PARTS, 0.0)
        for at, ids in zip(rows, generated, strict=False):
            own = labels[at][labels[at] != IGNORE_INDEX].tolist()
            found, wanted = self.text(ids), self.text(own)
            sums["rows"] += 1
            # Ignore white space at the ends, which depends on the template.
            sums["exact"] += found.strip() == wanted.strip()
            number, target = parse_number(found), parse_number(wanted)
            if target is None:
                continue
            sums["numbers"] += 1
            if number is not None:
                sums["parsed"] += 1
                error = number - target
                # Do not use a power: it raises OverflowError for large numbers, but a product becomes
                # infinite.
                sums["squared_error"] += error * error
        # Use float64 on the device: the counts stay exact when they are summed over all ranks.
        parts = {
            name: torch.tensor(value, dtype=torch.float64, device=total.device)
            for name, value in sums.items()
        }
        return Loss(total, parts)

    def generate(
        self, model: nn.Module, prompts: Sequence[list[int]], device: torch.device
    ) -> list[list[int]]:
        """Return the ids that follow each prompt, including the id that ends them."""
        stops = self.settings.stop

        def is_end(ids: Sequence[int]) -> bool:
            if ids[-1] in self._ends:
                return True
            # Decode only if there are stop texts, because each row would be decoded again at each token.
            if not stops:
                return False
            text = self.tokenizer.decode(ids)
            return any(stop in text for stop in stops)

        # Rows grow by one token per call: a graph for each length would be compiled and used only once.
        is_compiled = self.runtime is not None and should_compile(self.runtime, device)
        with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
            return decode(
                model,
                prompts,
                device=device,
                most=self.settings.max_new_tokens,
                is_end=is_end,
                is_even=self.is_sharded,
            )

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a completion up to the first id or stop text that ends it."""
        end = next((at for at, one in enumerate(ids) if one in self._ends), len(ids))
        text = self.tokenizer.decode(ids[:end])
        places = [at for stop in self.settings.stop if (at := text.find(stop)) >= 0]
        return text[: min(places)] if places else text


def parse_number(text: str) -> float | None:
    """Return the number that ``text`` consists of, or None if it is not exactly one number.

    For example, `` -1.5 `` returns -1.5, and ``3 apples`` returns None.
    """
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        return None
    value = float(found[0])
    return value if abs(value) <= _LARGEST else None


def summarize(means: Mapping[str, float]) -> dict[str, float]:
    """Return METRICS from the means of PARTS; a share of 0 items is NaN."""
    return {
        "exact_match": _share(means["exact"], means["rows"]),
        "parse_rate": _share(means["parsed"], means["numbers"]),
        "rmse": math.sqrt(_share(means["squared_error"], means["parsed"])),
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
