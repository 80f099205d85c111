"""Data parallelism over conversations, under torchrun: gloo on CPUs, nccl on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Group:
    """This process's place among the processes of a run; a single process needs no torchrun."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def share(self, costs: Sequence[int]) -> list[int]:
        """The items of this process, chosen so that all processes have nearly equal ``costs``.

        Items are assigned longest first, each to the process with the least cost so far. Prefix
        lengths span three orders of magnitude, so equal counts would leave most processes waiting.
        """
        loads = [0] * self.size
        mine = []
        for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            least = min(range(self.size), key=lambda r: (loads[r], r))
            loads[least] += costs[index]
            if least == self.rank:
                mine.append(index)
        return sorted(mine)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Sum every tensor over all processes, in place."""
        if self.size == 1:
            return
        tensors = list(tensors)
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        torch.distributed.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def wait(self) -> None:
        """Wait until every process has arrived here."""
        if self.size > 1:
            torch.distributed.barrier()


def join(device: str) -> Group:
    """The group in which torchrun started this process, or a group of one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Group()
    backend = "nccl" if device.startswith("cuda") else "gloo"
    torch.distributed.init_process_group(backend)
    return Group(torch.distributed.get_rank(), size)


def leave(group: Group) -> None:
    if group.size > 1:
        torch.distributed.destroy_process_group()


def local_device(device: str) -> str:
    """The device, with ``cuda`` replaced by this process's own GPU."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device
