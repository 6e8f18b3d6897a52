"""Device buffers that every tile and every layer of a pass reuse."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Buffers by name, each as large as the largest request so far. What a buffer held is lost at the next request."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of this shape with arbitrary contents."""
        numbers = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < numbers:
            self._buffers.pop((name, dtype), None)
            buffer = self._buffers[name, dtype] = torch.empty(numbers, dtype=dtype, device=self.device)
        return buffer[:numbers].view(shape)

    def free(self, *names: str) -> None:
        """Give these buffers back."""
        for key in [key for key in self._buffers if key[0] in names]:
            del self._buffers[key]
