"""States of sequences, computed once: a cache that is keyed by the content of a sequence and the identity of
the encoder.

It consists of files that are written whole and never changed, so that any number of processes may add to it.
"""

import hashlib
import os
import secrets
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from evergrad_latent_edit.encoder import (
    Encoder,
    Tokens,
    encode,
    single_thread,
)
from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import DataError, ModelError
from evergrad_trainer.data.preparation.disk_errors import disk_errors

States = npt.NDArray[np.float32]
UNFINISHED_STATES: Final = ".states-{}.tmp"
_STATES_A_FILE: Final = 4096
"""At most so many are computed again after a kill."""
_REMEDY: Final = "Delete it: its states are computed again"


def key_of(tokens: Tokens) -> bytes:
    """The content of a sequence as the encoder reads it, with the place that is pooled, 32 bytes."""
    ids = tokens.ids.astype("<u4").tobytes()
    span = np.asarray([tokens.first, tokens.last], dtype="<u8").tobytes()
    return hashlib.sha256(span + ids).digest()


class FeatureCache:
    """States of the encoder ``identity``, in a folder of its own below ``folder``."""

    def __init__(self, folder: Path, identity: str) -> None:
        self.folder = folder / f"states-{identity[:16]}"
        self._identity = identity

    def load(self, wanted: Iterable[bytes]) -> dict[bytes, States]:
        """Those states of ``wanted`` that are there.

        Raises DataError for a file that is damaged, and for one of another encoder, which was copied here.
        """
        missing = set(wanted)
        found: dict[bytes, States] = {}
        for path in sorted(self.folder.glob("states-*.npz")):
            try:
                # Opened here: of a damaged file the library would leave that to the collector.
                with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                    keys, states = file["keys"], file["states"]
                    encoder = str(file["encoder"])
            except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
                why = " ".join(str(error).split())[:200]
                raise DataError(
                    Problem(str(path), "cannot be read", why, _REMEDY)
                ) from error
            if encoder != self._identity:
                what, why = (
                    "holds states of another encoder",
                    f"its folder is of {self._identity}",
                )
                raise DataError(Problem(str(path), what, why, _REMEDY))
            pairs = zip(map(bytes, keys), states, strict=True)
            found |= {key: state for key, state in pairs if key in missing}
        return found

    def add(self, states: Mapping[bytes, States]) -> None:
        """Write states as one file more."""
        self.folder.mkdir(parents=True, exist_ok=True)
        token = secrets.token_hex(8)
        unfinished = self.folder / UNFINISHED_STATES.format(token)
        with unfinished.open("wb") as file:
            keys = np.array([list(key) for key in states], dtype=np.uint8)
            all_states = np.stack(list(states.values()))
            np.savez(file, keys=keys, states=all_states, encoder=np.array(self._identity))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, self.folder / f"states-{token}.npz")


def compute_states(
    encoder: Encoder,
    wanted: Mapping[bytes, Tokens],
    cache: FeatureCache,
    *,
    on_progress: Callable[[int, int], None],
) -> dict[bytes, States]:
    """The state of each of ``wanted``, from the cache or computed now and added to it.

    Raises DataError, and ModelError where the model cannot be built or gives states of another width.
    """
    found = cache.load(wanted)
    missing = [key for key in wanted if key not in found]
    if not missing:
        return found
    device = torch.device("cpu")
    # Also while it is built: weights that are made on several threads would leave those behind.
    with single_thread(device):
        model = encoder.build()
        fresh: dict[bytes, States] = {}
        for number, key in enumerate(missing, 1):
            one = wanted[key]
            state = encode(
                model,
                one.tensor(),
                (one.first, one.last),
                layer=encoder.layer,
                normalize=encoder.settings.normalize,
            )
            # The predictor is made for the width that the configuration says.
            if len(state) != encoder.width:
                what = f"its states have {len(state)} numbers"
                why = f"its configuration says hidden_size {encoder.width}"
                remedy = "Use an encoder whose layers all have one width"
                raise ModelError(Problem("spec.training.model", what, why, remedy))
            fresh[key] = state.numpy()
            if len(fresh) == _STATES_A_FILE or number == len(missing):
                with disk_errors(cache.folder):
                    cache.add(fresh)
                found |= fresh
                fresh = {}
            on_progress(number, len(missing))
    return found
