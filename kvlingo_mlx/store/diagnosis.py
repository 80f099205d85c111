"""Diagnosis of an installation: its facts, and what is wrong with it.

Each step checks one thing and returns findings; a finding with a problem says what to do.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from kvlingo_mlx.backend import EXACT, TF32, float32_error, mx

import huggingface_hub
from huggingface_hub import constants
from packaging.requirements import Requirement
from packaging.version import Version

from kvlingo_mlx import blas
from kvlingo_mlx.errors import MalformedTranslatorError
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.loading.translators import store
from kvlingo_mlx.reporting import measure

# The versions that the package's metadata require, for a checkout that has no metadata.
TESTED = {"mlx": ">=0.32.4,<0.33", "mlx-lm": ">=0.32.2,<0.33"}
OTHERS = ("torch", "transformers", "datasets", "lm-eval")
BACKENDS = ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")  # each brings its own libmlx
LEAST_FREE = 2**30  # bytes of free disk space
LEAST_FILES = 256  # files open at once; macOS's own limit
REACH_S = 3.0
SIZE = 512  # rows and columns of the product with which a BLAS is timed


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: The name of what was checked.
        value: What was found.
        problem: What is wrong and what to do about it, or None.
        grade: What a problem makes of the installation: ``wrong``, or only ``slow`` or ``inexact``.
    """

    name: str
    value: str
    problem: str | None = None
    grade: str = "wrong"

    def as_json(self) -> dict[str, str | None]:
        """Its attributes; what is sound has no grade."""
        return {**asdict(self), "grade": self.grade if self.problem else None}


def diagnose() -> list[Finding]:
    """All findings, in the order in which they are shown."""
    steps = (
        _machine, _backends, _versions, _device, _blas, _precision, _limits, _translators, _disks,
        _hub,
    )  # fmt: skip
    return [finding for step in steps for finding in step()]


def _machine() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Finding("system", f"{system}, Python {platform.python_version()}")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _backends() -> Iterator[Finding]:
    """Installed MLX builds: they share one file, the last one wins, removing one breaks another."""
    found = [name for name in BACKENDS if _installed(name)]
    problem = None
    if len(found) > 1:
        problem = (
            f"{' and '.join(found)} own the same libmlx; keep one: pip uninstall -y "
            f"{' '.join(found)}, then install that one anew"
        )
    yield Finding("MLX builds", ", ".join(found) or "none beside mlx itself", problem)


def _versions() -> Iterator[Finding]:
    for name, bounds in _tested().items():
        found = _installed(name)
        if found is None:
            yield Finding(name, "not installed", f'install it: pip install "{name}{bounds}"')
            continue
        problem = None
        if Version(found) not in Requirement(f"{name}{bounds}").specifier:
            problem = f'{found} is not among the tested {bounds}: pip install "{name}{bounds}"'
        yield Finding(name, f"{found} (tested {bounds})", problem)
    for name in OTHERS:
        yield Finding(name, _installed(name) or "not installed (optional)")


def _tested() -> dict[str, str]:
    """The packages and versions that the package's metadata require."""
    try:
        lines = metadata.requires("kvlingo-mlx") or []
    except metadata.PackageNotFoundError:
        return TESTED
    wanted = [Requirement(line) for line in lines]
    here = [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    return {r.name: str(r.specifier) for r in here} or TESTED


def _device() -> Iterator[Finding]:
    """The default device, tested by one product."""
    problem = None
    try:
        sound = mx.matmul(mx.ones((4, 8)), mx.ones((8, 4))).sum().item() == 128.0
    except RuntimeError as error:
        sound, problem = False, f"it does not compute ({error}); install MLX anew"
    if not sound:
        problem = problem or "it computes a product wrongly; install MLX anew"
    yield Finding("device", str(mx.default_device()), problem)


def _blas() -> Iterator[Finding]:
    """The BLAS that MLX uses on a CPU, and its speed."""
    name = measure.fast_blas()
    if name is None:
        return
    with mx.stream(mx.cpu):
        square = mx.ones((SIZE, SIZE))
        mx.eval(square)
        took = min(measure.seconds(lambda: mx.eval(square @ square)) for _ in range(3))
    value = f"{name}, float32 products at {2 * SIZE**3 / took / 1e9:,.0f} GFLOP/s"
    problem = blas.missed()
    if blas.choice() is None and name == blas.BUNDLED:
        problem = "KVLINGO_BLAS=0 chose the BLAS that MLX bundles; leave it out for speed"
    yield Finding("BLAS", value, problem, "slow")


def _precision() -> Iterator[Finding]:
    """Whether float32 products are computed in float32."""
    error, problem = float32_error(), None
    if error > EXACT:
        problem = (
            f"errors of {error:.0e} where float32 has 1e-06: MLX multiplies in TF32; leave {TF32} "
            "out, or set it to 0, before Python starts"
        )
    yield Finding(
        "float32 products", f"error {error:.0e} ({TF32}={os.environ.get(TF32)})", problem, "inexact"
    )


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    problem = None
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        problem = f"too few for models in many files: ulimit -n {LEAST_FILES * 4}"
    yield Finding("open files", f"at most {soft} (hard limit {hard})", problem)


def _translators() -> Iterator[Finding]:
    """The store's folders, each read as an import does, and the remains of killed processes."""
    root = store()
    folders = sorted(p for p in root.glob("*") if p.is_dir()) if root.is_dir() else []
    yield Finding(
        "store", f"{root}, {sum(not p.name.startswith('.') for p in folders)} translators"
    )
    for folder in folders:
        size = f"{sum(p.stat().st_size for p in folder.rglob('*') if p.is_file()) / 1e6:,.1f} MB"
        if folder.name.startswith("."):
            yield Finding(folder.name, size, _unfinished(folder))
        else:
            yield Finding(folder.name, size, _damage(folder))


def _unfinished(folder: Path) -> str:
    if (folder / "old").is_dir():
        return f"it may be a translator's only copy: move {folder / 'old'} back to its name"
    return f"a stopped import left it: rm -r {folder}"


def _damage(folder: Path) -> str | None:
    try:
        translator_folder.check_sizes(folder, *translator_folder.read(folder))
    except (MalformedTranslatorError, OSError) as error:
        return f"{error}; import it again, or rm -r {folder}"
    return None


def _disks() -> Iterator[Finding]:
    for name, folder in (("store", store()), ("models", Path(constants.HF_HUB_CACHE))):
        there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        free = shutil.disk_usage(there).free
        problem = None
        if free < LEAST_FREE:
            problem = f"nearly full: free some of {there}"
        elif not os.access(there, os.W_OK):
            problem = f"{there} is read-only: nothing can be put there"
        yield Finding(f"disk of the {name}", f"{free / 1e9:,.1f} GB free", problem)


def _hub() -> Iterator[Finding]:
    """The Hub: whether it is used and can be reached, and whether there is a token."""
    if constants.HF_HUB_OFFLINE:
        yield Finding("Hub", "offline (HF_HUB_OFFLINE): only what is in its cache is used")
    else:
        reached = "reached" if _reach(constants.ENDPOINT) else "not reached"
        yield Finding("Hub", f"{reached}, what is in its cache is used either way")
    token = "there is one" if huggingface_hub.get_token() else "none (only gated models need it)"
    yield Finding("Hub token", token)


def _reach(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        with socket.create_connection((parts.hostname or "", port), REACH_S):
            return True
    except OSError:
        return False
