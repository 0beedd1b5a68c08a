"""Host memory that a GPU copies from and to without a detour, and how tensors are laid into it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from slime_core.errors import TrainerError

PIECE_BYTES = 256 * 2**20
"""Host memory is taken in pieces of this size: torch rounds pinned memory up to powers of two."""
COPY_THREADS = 8
ALIGNED = 64
"""Tensors that share a block begin at multiples of so many elements."""


def host_pieces(
    sizes: Sequence[int], dtype: torch.dtype, *, pinned: bool, who: str, fix: str
) -> list[torch.Tensor]:
    """Tensors of some numbers of elements, [elements] each, not filled.

    Args:
        who: the beginning of the sentence that is said where there is not so much memory.
        fix: its end.

    Raises:
        TrainerError: there is not so much.
    """
    try:
        return [torch.empty(size, dtype=dtype, pin_memory=pinned) for size in sizes]
    except RuntimeError as error:  # CUDA's own words are "out of memory", as if of the GPU
        raise TrainerError(
            f"{who}: the host has no room for its {sum(sizes) * dtype.itemsize} bytes of "
            f"{'pinned ' if pinned else ''}memory ({error}); {fix}"
        ) from error


def packed(sizes: Sequence[int], block: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Lays tensors of `sizes` elements into blocks, none of them over a border.

    Args:
        block: elements of a block; more where a tensor is larger.

    Returns:
        (Block, offset) of each tensor, and the elements that each block needs.
    """
    aligned = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    largest = max(aligned, default=0)
    while block < largest:
        block *= 2
    places = [(0, 0)] * len(sizes)
    ends: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda one: -aligned[one]):
        fitting = (n for n, end in enumerate(ends) if end + aligned[index] <= block)
        number = next(fitting, len(ends))
        if number == len(ends):
            ends.append(0)
        places[index] = (number, ends[number])
        ends[number] += aligned[index]
    return places, ends


def cut(sizes: Sequence[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cuts tensors of `sizes` elements into lists of parts (tensor, start, stop), in order, with
    `most` elements together."""
    parts: list[tuple[int, int, int]] = []
    room = most
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            parts.append((index, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield parts
                parts, room = [], most
    if parts:
        yield parts


@contextmanager
def copy_threads(on_gpu: bool) -> Iterator[None]:
    """More threads while the states of a model on a GPU are put together in the host's memory,
    which is copying alone: with one thread 8 GB took 24 to 28 s, with eight 12 s."""
    before = torch.get_num_threads()
    if on_gpu:
        own = len(os.sched_getaffinity(0)) // dist.get_world_size()
        torch.set_num_threads(max(before, min(own, COPY_THREADS)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
