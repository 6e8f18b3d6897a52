"""Tensors parked in pinned host memory between the forward and the backward, copied on a side stream.

    store = HostStore(device)
    store.save("layer 3", x)                 # returns at once; x may be overwritten after store.wait_saved()
    store.load_rows("layer 3", x, 0, 4096)   # returns at once; x is valid after store.wait_loaded()

Pinned memory is slow to get (about a second a GiB), so it is kept in blocks of one size that every later pass reuses,
whatever its length. On a CPU a parked tensor is a plain copy.
"""

from __future__ import annotations

import logging
import mmap

import torch
from torch import Tensor

from traceforge_core.errors import TraceForgeError

log = logging.getLogger(__name__)
BLOCK_BYTES = 64 << 20
SLAB_BLOCKS = 16


class _PinnedBlocks:
    """Equal blocks of pinned host memory. They grow with the longest pass and stay for the life of the process."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []
        self.total = 0

    def take(self, count: int) -> list[Tensor]:
        while len(self.free) < count:
            self.free += _pinned_slab()
            self.total += SLAB_BLOCKS * BLOCK_BYTES
        return [self.free.pop() for _ in range(count)]


_blocks = _PinnedBlocks()


def pinned_bytes() -> int:
    """Pinned host memory held by this process, in bytes."""
    return _blocks.total


def _pinned_slab() -> list[Tensor]:
    """One slab of pinned memory, cut into blocks.

    Registering pages that all cores have touched before is several times as fast as cudaHostAlloc, which touches them
    one by one; huge pages make both cheaper.
    """
    size = SLAB_BLOCKS * BLOCK_BYTES
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        slab = torch.frombuffer(pages, dtype=torch.uint8)
        slab.zero_()
        status = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), size, 0)
        if int(status) != 0:
            raise RuntimeError(f"cudaHostRegister: {status}")
    except (OSError, ValueError, RuntimeError) as error:
        log.info("pinning by registration failed (%s); asking for pinned memory directly", error)
        try:
            slab = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as failure:
            raise TraceForgeError(
                f"Out of pinned host memory after {_blocks.total / 2**30:.1f} GiB: {str(failure).splitlines()[0]}. "
                "Shorter samples need less; `traceforge plan` says how much a length needs."
            ) from None
    return list(slab.split(BLOCK_BYTES))


class HostStore:
    """What one forward pass parks for its backward. Blocks return to the pool with `release` or when it is dropped."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._parked: dict[str, list[Tensor]] = {}
        self._saved: torch.cuda.Event | None = None
        self._loaded: torch.cuda.Event | None = None

    def save(self, name: str, x: Tensor, on_device: bool = False) -> None:
        """Park a copy of x, a contiguous matrix. `on_device` keeps the copy in device memory."""
        if not x.is_cuda or on_device:
            self._parked[name] = [x.clone()]
            return
        rows = _rows_per_block(x)
        blocks = _blocks.take(-(-x.shape[0] // rows))
        stream = _side_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for number, block in enumerate(blocks):
                part = x[number * rows : (number + 1) * rows]
                _view(block, part).copy_(part, non_blocking=True)
        self._saved = stream.record_event()
        self._parked[name] = blocks

    def wait_saved(self) -> None:
        """Let the compute stream wait until what was saved last may be overwritten."""
        if self._saved is not None:
            torch.cuda.current_stream(self.device).wait_event(self._saved)

    def load_rows(self, name: str, x: Tensor, start: int, end: int) -> None:
        """Copy rows [start, end) back into the same rows of x, after the compute stream's work so far."""
        parked = self._parked[name]
        if not x.is_cuda or parked[0].is_cuda:
            x[start:end] = parked[0][start:end]
            return
        rows = _rows_per_block(x)
        stream = _side_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for number in range(start // rows, -(-end // rows)):
                first = number * rows
                low, high = max(start, first), min(end, first + rows)
                block = _view(parked[number], x[first : first + rows])
                x[low:high].copy_(block[low - first : high - first], non_blocking=True)
        self._loaded = stream.record_event()

    def wait_loaded(self) -> None:
        """Let the compute stream wait until everything asked for so far is there."""
        if self._loaded is not None:
            torch.cuda.current_stream(self.device).wait_event(self._loaded)

    def drop(self, name: str) -> None:
        """Forget one tensor; its blocks go back to the pool."""
        for block in self._parked.pop(name, []):
            if not block.is_cuda and self.device.type == "cuda":
                _blocks.free.append(block)

    def release(self) -> None:
        """Forget everything."""
        for name in list(self._parked):
            self.drop(name)

    def __del__(self) -> None:
        self.release()


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]


def _rows_per_block(x: Tensor) -> int:
    return max(1, BLOCK_BYTES // (x.shape[1] * x.element_size()))


def _view(block: Tensor, like: Tensor) -> Tensor:
    """The block's first bytes as a matrix of the shape and dtype of `like`."""
    size = like.numel() * like.element_size()
    return block[:size].view(like.dtype).view(like.shape)
