"""What is planned for a GPU, run on the CPU: the arithmetic is tested, not the kernels."""

import contextlib
from collections.abc import Iterator

from kvlingo_mlx.backend import mx

import pytest

from kvlingo_mlx import caches
from kvlingo_mlx.models import capture, keys
from kvlingo_mlx.translators import base, products

MODULES = (base, products, keys, caches, capture)


@contextlib.contextmanager
def planned_for_a_gpu() -> Iterator[None]:
    """Products, norms, rotation and writes as on a GPU; compiled functions run uncompiled."""
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(module, "on_gpu", lambda: True)
        mx.disable_compile()
        try:
            yield
        finally:
            mx.enable_compile()
