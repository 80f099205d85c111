"""Check that models, a translator and caches fit into memory, before anything is read.

The need is estimated low (weights as stored, caches of the prompt only, no temporary arrays), so
anything refused could not have run.
"""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvlingo_mlx.backend import mx, on_gpu

from mlx.utils import tree_flatten

from kvlingo_mlx import caches
from kvlingo_mlx.errors import NotEnoughMemoryError
from kvlingo_mlx.models.language_model import LanguageModel

LIMIT = "KVLINGO_MEMORY_LIMIT"  # GB that arrays may take, replaces the measured limit; 0: no limit
FEWER_BITS = "models of fewer bits (`mlx_lm.convert -q`) or"
# The name of the GPU's memory size in MLX's device info, on Metal and on other GPUs.
GPU_KEYS = ("max_recommended_working_set_size", "total_memory", "memory_size")
# The files in which a container finds its own memory limit: cgroup versions 2 and 1.
CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check(
    parts: Mapping[str, int], held: int = 0, instead: str = f"{FEWER_BITS} a shorter prompt"
) -> None:
    """Refuse a need of more memory than there is.

    Args:
        parts: Bytes by purpose; the purpose is shown in the message.
        held: Bytes of these that are in memory already.
        instead: What needs less, for the message.

    Raises:
        NotEnoughMemoryError: The message gives the needed and the available memory.
        ValueError: ``KVLINGO_MEMORY_LIMIT`` is not a number.
    """
    there, needed = free(), sum(parts.values())
    if there is None or needed <= there + held:
        return
    raise NotEnoughMemoryError(
        f"{size_of(needed)} of memory are needed ({listed(parts)}), and "
        f"{size_of(there + held)} are available; take "
        f"{instead}, end other programs, or set {LIMIT}=0 to try all the same"
    )


def listed(parts: Mapping[str, int]) -> str:
    """Bytes by purpose as text."""
    return ", ".join(f"{name} {size_of(size)}" for name, size in parts.items())


def free() -> int | None:
    """The bytes that arrays may still take on the default device; None if that is unknown."""
    if LIMIT in os.environ:
        limit = _given(os.environ[LIMIT])
    elif on_gpu():
        info = mx.device_info()
        limit = next((int(info[key]) for key in GPU_KEYS if key in info), None)
    else:
        return _available()
    return None if limit is None else max(0, limit - mx.get_active_memory())


def weights_bytes(model: LanguageModel) -> int:
    """The bytes of a model's weights, each once, whether they have been read yet or not."""
    arrays = dict(tree_flatten(model.model.parameters())).values()
    return sum({id(array): array.nbytes for array in arrays}.values())


def cache_bytes(model: LanguageModel, num_tokens: int) -> int:
    """The bytes of a model's cache of ``num_tokens`` here; a layer holds at most its window."""
    if model.address is not None:
        return 0
    both = zip(caches.bytes_by_layer(model), model.geometry.layers, strict=True)
    entries = sum(size * min(num_tokens, layer.window or num_tokens) for size, layer in both)
    return entries + caches.state_bytes(model)


def check_caches(models: Iterable[LanguageModel], num_tokens: int) -> None:
    """Refuse (as :func:`check`) a prompt whose caches do not fit beside what is loaded already."""
    needed = sum(cache_bytes(model, num_tokens) for model in models)
    check({caches_of(num_tokens): needed})


def caches_of(num_tokens: int) -> str:
    """The name of a prompt's caches in a message."""
    return f"caches of {num_tokens} tokens"


def _given(text: str) -> int | None:
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = math.nan
    if not 0 <= gigabytes < 1e9:
        raise ValueError(f"{LIMIT} is {text!r}; give a number of gigabytes, or 0 for no limit")
    return int(gigabytes * 1e9) or None


def _available() -> int:
    """The main memory available without swapping, within a container's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CGROUPS:
        text = _text(path).strip()
        if text.isdecimal():  # "max" means no limit
            limits.append(int(text))
    found = max(0, min(limits) - mx.get_active_memory())
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found = min(found, int(line.split()[1]) * 1024)
    return found


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # on macOS, or without such a container
        return ""


def size_of(count: int) -> str:
    """Bytes as text, in MB or GB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
