"""The least that a save from memory can take: a copy of every tensor into memory that is kept from save to save."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_buffers: list[torch.Tensor] = []


def copy_into_warm(tensors: Sequence[torch.Tensor]) -> None:
    """``copy_`` each tensor into its buffer; to be called after :func:`warm_up`."""
    for buffer, tensor in zip(_buffers, tensors, strict=True):
        buffer.copy_(tensor)


def warm_up(tensors: Sequence[torch.Tensor]) -> None:
    """Make the buffers, and touch every page of them; pinned where the tensors are on a GPU."""
    forget()
    _buffers.extend(torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda) for tensor in tensors)
    copy_into_warm(tensors)


def forget() -> None:
    """Give the buffers back."""
    _buffers.clear()
