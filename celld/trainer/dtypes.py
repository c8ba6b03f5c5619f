"""The two number types of a network, and the way of its tensors into arrays and back.

numpy has no bf16, so `celld.weights` holds such an array as uint16: this is where the bits change their name.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from celld.weights import Array

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # by `trainer.dtype`
BY_KIND = {"F32": torch.float32, "BF16": torch.bfloat16}  # by safetensors' word for it


def to_array(tensor: Tensor) -> Array:
    """The same bits; a view where the tensor is on the CPU."""
    held = tensor.detach().cpu()
    array: Array = (held.view(torch.uint16) if held.dtype == torch.bfloat16 else held).numpy()
    return array


def to_arrays(each: Iterable[tuple[str, Tensor]], *, kept: bool) -> dict[str, Array]:
    """In the order of the names; nothing if they are not `kept`: then each is gone when the next one comes."""
    arrays = {}
    for name, tensor in each:
        if kept:
            arrays[name] = to_array(tensor)
    return dict(sorted(arrays.items()))


def to_tensor(array: Array) -> Tensor:
    """Inverse of `to_array`, a copy: an array may be read-only."""
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
