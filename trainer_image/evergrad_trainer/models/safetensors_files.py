"""Writes safetensors files tensor by tensor, so that only one tensor is in memory.

A file consists of eight bytes with the length of the header, the header as JSON (types, shapes and offsets of
all tensors), and the bytes of the tensors without gaps: https://github.com/huggingface/safetensors#format.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from evergrad_manifest.errors import Problem, raise_if
from evergrad_trainer.base.durable import naming, write_all
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.models.stored_files import INDEX, SINGLE

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorForm:
    """The type and shape of a tensor that is not in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def find_tensors(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor that transformers would load from ``directory``, by tensor name."""
    from safetensors import safe_open

    index = directory / INDEX
    if not (directory / SINGLE).exists() and index.exists():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: directory / file for name, file in names.items()}
    if not (directory / SINGLE).exists():
        return {}
    with safe_open(directory / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), directory / SINGLE)


def write_weights(
    directory: Path,
    forms: Mapping[str, TensorForm],
    read: Callable[[str], torch.Tensor],
    *,
    num_parameters: int,
    max_file_bytes: int,
) -> None:
    """Write the tensors of ``forms`` to ``directory``, with the file names that transformers uses.

    ``read`` returns a tensor by name, contiguous on the host and with the type and shape in ``forms``. It is
    called for one tensor at a time. A file contains at least one tensor, and as many as fit in
    ``max_file_bytes``. If there are several files, an index maps tensors to files. Raises ModelError if the
    format does not support a type, ValueError if a tensor has another type or shape, and OSError if a file
    cannot be written.
    """
    raise_if(
        [
            Problem(
                name,
                f"cannot be written as {form.dtype}",
                "safetensors files have no such type",
            )
            for name, form in forms.items()
            if form.dtype not in _DTYPES
        ],
        ModelError,
    )
    files: list[dict[str, TensorForm]] = []
    room = 0
    for name, form in forms.items():
        if not files or form.bytes > room:
            files.append({})
            room = max_file_bytes
        files[-1][name] = form
        room -= form.bytes

    if len(files) <= 1:
        _write_file(directory / SINGLE, forms, read)
        return
    weight_map: dict[str, str] = {}
    for number, content in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file(directory / name, content, read)
        weight_map |= dict.fromkeys(content, name)
    total = sum(form.bytes for form in forms.values())
    metadata = {"total_parameters": num_parameters, "total_size": total}
    index = {"metadata": metadata, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (directory / INDEX).write_text(text, encoding="utf-8")


def _write_file(
    path: Path, forms: Mapping[str, TensorForm], read: Callable[[str], torch.Tensor]
) -> None:
    # Write wide types first, like the library, so that every tensor is aligned for its type.
    names = sorted(forms, key=lambda name: (-forms[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in names:
        form = forms[name]
        header[name] = {
            "dtype": _DTYPES[form.dtype],
            "shape": form.shape,
            "data_offsets": (begin, begin + form.bytes),
        }
        begin += form.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with naming(path):
            write_all(descriptor, memoryview(len(text).to_bytes(8, "little") + text))
            for name in names:
                tensor = read(name)
                if (tensor.dtype, tuple(tensor.shape)) != (
                    forms[name].dtype,
                    forms[name].shape,
                ):
                    raise ValueError(f"{name} does not have the declared form")
                if tensor.numel():
                    write_all(descriptor, tensor.reshape(-1).view(torch.uint8).numpy().data)
                # Free the tensor before the next one is read: two tensors need twice the memory.
                del tensor
            # The caller renames the directory next. Without fsync, a power failure could leave it with empty
            # files.
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
