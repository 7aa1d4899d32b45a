"""Greedy decoding: continues prompts with the most probable id at each position."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import nn

IsEnd = Callable[[Sequence[int]], bool]
_WIDTHS: Final = 64
"""Rows without a cache are padded to a multiple of this width, which gives few shapes, not one per id."""


def decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    device: torch.device,
    most: int,
    is_end: IsEnd,
    is_even: bool = False,
) -> list[list[int]]:
    """Return the ids that follow each prompt.

    A row ends after ``most`` ids, when ``is_end`` of its new ids is true (including the last id), or when the
    model has no more positions. ``is_even``: always call the model ``most`` times, because other ranks take
    part in each call.
    """
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    rows = [list(prompt) for prompt in prompts]
    is_done = [False] * len(rows)
    # Use the cache only if the model accepts all of these arguments. Both decoders read the new ids from
    # ``rows``.
    known = inspect.signature(model.forward).parameters.keys()
    decoder: _Decoder
    if {"past_key_values", "attention_mask", "position_ids", "use_cache"} <= known:
        decoder = _Cached(model, rows, device, positions)
    else:
        decoder = _Whole(model, rows, device, positions)
    for _ in range(most):
        if positions is not None:
            is_done = [
                done or len(row) >= positions
                for done, row in zip(is_done, rows, strict=True)
            ]
        if all(is_done) and not is_even:
            break
        for at, token in enumerate(decoder.next_ids()):
            if is_done[at]:
                continue
            rows[at].append(token)
            is_done[at] = is_end(rows[at][len(prompts[at]) :])
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


class _Decoder(Protocol):
    def next_ids(self) -> list[int]:
        """Return the most probable next id of each row."""


class _Cached:
    """Caches keys and values. Rows are padded on the left, so that all rows continue at the same index."""

    def __init__(
        self,
        model: nn.Module,
        rows: Sequence[Sequence[int]],
        device: torch.device,
        positions: int | None,
    ) -> None:
        known = inspect.signature(model.forward).parameters.keys()
        # Compute only the logits of the last token, and no router loss, which does not apply to decoding.
        choices = {"logits_to_keep": 1, "output_router_logits": False}
        self._choices = {name: value for name, value in choices.items() if name in known}
        self._model = model
        self._past: Any = None
        self._most = positions
        width = max(map(len, rows), default=0)
        self._ids = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
        self._mask = torch.zeros_like(self._ids)
        for at, row in enumerate(rows):
            self._ids[at, width - len(row) :] = torch.tensor(row, device=device)
            self._mask[at, width - len(row) :] = 1
        self._places = (self._mask.cumsum(dim=1) - 1).clamp(min=0)

    def next_ids(self) -> list[int]:
        output = self._model(
            input_ids=self._ids,
            attention_mask=self._mask,
            position_ids=self._places,
            past_key_values=self._past,
            use_cache=True,
            **self._choices,
        )
        self._past = output.past_key_values
        found = output.logits[:, -1].argmax(dim=-1)
        self._ids = found[:, None]
        self._mask = torch.cat([self._mask, torch.ones_like(self._ids)], dim=1)
        self._places = self._places[:, -1:] + 1
        if self._most is not None:
            # A row at the last position gets no more ids. It is only computed along with the other rows.
            self._places = self._places.clamp(max=self._most - 1)
        ids: list[int] = found.tolist()
        return ids


class _Whole:
    """Computes each row from its beginning for every id, for models without a cache of keys and values."""

    def __init__(
        self,
        model: nn.Module,
        rows: Sequence[Sequence[int]],
        device: torch.device,
        positions: int | None,
    ) -> None:
        self._model = model
        self._rows = rows
        self._device = device
        self._most = positions

    def next_ids(self) -> list[int]:
        rows = self._rows
        width = -(-max(map(len, rows)) // _WIDTHS) * _WIDTHS
        width = min(width, self._most or width)
        inputs = torch.zeros(len(rows), width, dtype=torch.int64, device=self._device)
        for at, row in enumerate(rows):
            inputs[at, : len(row)] = torch.tensor(row, device=self._device)
        # Padding on the right is safe, because later tokens do not change the results of earlier tokens.
        logits = self._model(input_ids=inputs, use_cache=False).logits
        numbers = torch.arange(len(rows), device=self._device)
        last = torch.tensor([len(row) - 1 for row in rows], device=self._device)
        ids: list[int] = logits[numbers, last].argmax(dim=-1).tolist()
        return ids
