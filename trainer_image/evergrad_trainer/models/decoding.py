"""Greedy decoding: the ids that a model continues with, each the most probable one."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import nn

IsEnd = Callable[[Sequence[int]], bool]
_WIDTHS: Final = 64
"""Rows that are computed whole are as wide as the next multiple of it: few shapes instead of one a token."""


def decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    device: torch.device,
    most: int,
    is_end: IsEnd,
    is_even: bool = False,
) -> list[list[int]]:
    """The ids that follow each prompt: at most ``most``, up to and with the one at which ``is_end`` of them
    is true, and no further than the model has positions.

    ``is_even``: call the model ``most`` times whatever it gives, since other ranks take part in each call.
    """
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    rows = [list(prompt) for prompt in prompts]
    is_done = [False] * len(rows)
    # Only a model that takes all of these keeps keys and values; each id is added to ``rows`` as it is taken.
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
        """The most probable next id of each row."""


class _Cached:
    """Keeps the keys and values of what was read. Rows are filled up at their left, so that all of them go on
    at the same place."""

    def __init__(
        self,
        model: nn.Module,
        rows: Sequence[Sequence[int]],
        device: torch.device,
        positions: int | None,
    ) -> None:
        known = inspect.signature(model.forward).parameters.keys()
        # The last token's logits are all that is wanted; a router loss has no place in a row that continues.
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
            # A row that has come to the last position takes no more ids; it only continues beside the others.
            self._places = self._places.clamp(max=self._most - 1)
        ids: list[int] = found.tolist()
        return ids


class _Whole:
    """Reads each row from its beginning for every id: for models that keep nothing, or something else."""

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
        # Later tokens do not change what is computed for an earlier one.
        logits = self._model(input_ids=inputs, use_cache=False).logits
        numbers = torch.arange(len(rows), device=self._device)
        last = torch.tensor([len(row) - 1 for row in rows], device=self._device)
        ids: list[int] = logits[numbers, last].argmax(dim=-1).tolist()
        return ids
