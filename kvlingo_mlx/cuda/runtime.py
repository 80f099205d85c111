"""How a training on PyTorch opens its models and joins its processes.

Data parallelism over conversations is torchrun's: gloo on CPUs, nccl on GPUs.
"""

import os
from collections.abc import Iterable

import numpy as np
import torch

from kvlingo_mlx.cuda import model
from kvlingo_mlx.group import Group

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load(name: str, dtype: str | None, device: str) -> model.TorchModel:
    """A model on this process's device, in bfloat16 unless ``dtype`` says otherwise."""
    return model.load(name, dtype=DTYPES[dtype or "bfloat16"], device=local_device(device))


def check_device(device: str) -> None:
    """Refuse (ValueError) a GPU that is not there."""
    gpus, place = torch.cuda.device_count(), local_device(device)
    if place != "cpu" and int(place.removeprefix("cuda:")) >= gpus:
        raise ValueError(
            f"--device is {place}, but PyTorch finds {gpus} CUDA GPUs here; use --device mlx or "
            "cpu, or a CUDA build of PyTorch where there is a GPU"
        )


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
    if device.startswith("cuda"):
        torch.cuda.set_device(local_device(device))  # else all sums and barriers are on the first
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return TorchGroup(torch.distributed.get_rank(), size)


def leave(group: Group) -> None:
    if group.size > 1:
        torch.distributed.destroy_process_group()


def local_device(device: str) -> str:
    """The device, with ``cuda`` replaced by this process's own GPU."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device
