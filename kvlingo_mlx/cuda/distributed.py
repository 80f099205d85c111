"""Data parallelism over conversations, under torchrun: gloo on CPUs, nccl on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
import torch

from kvlingo_mlx.group import Group


class TorchGroup(Group):
    """The processes that torchrun started; each makes the closed form anew."""

    @property
    def of_fits(self) -> Group:
        return Group()

    def total(self, numbers: np.ndarray) -> np.ndarray:
        device = torch.device("cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
        tensor = torch.tensor(numbers, device=device)
        torch.distributed.all_reduce(tensor)
        return tensor.cpu().numpy()

    def add(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The sums, in the tensors that were given."""
        tensors = list(tensors)
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        torch.distributed.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))
        return tensors

    def wait(self) -> None:
        torch.distributed.barrier()


def join(device: str) -> Group:
    """The group in which torchrun started this process, or a group of one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Group()
    backend = "nccl" if device.startswith("cuda") else "gloo"
    torch.distributed.init_process_group(backend)
    return TorchGroup(torch.distributed.get_rank(), size)


def leave(group: Group) -> None:
    if group.size > 1:
        torch.distributed.destroy_process_group()


def local_device(device: str) -> str:
    """The device, with ``cuda`` replaced by this process's own GPU."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device
