"""Diagnosis of an installation: its facts, and what is wrong with it.

Each step checks one thing and returns findings; a finding with a problem says what to do.
"""

import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
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

OTHERS = ("torch", "transformers", "datasets", "lm-eval")
BACKENDS = ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")  # each brings its own libmlx
LEAST_FREE = 2**30  # bytes of free disk space
LEAST_FILES = 256  # files open at once; macOS's own limit
REACH_S = 3.0
SIZE = 512  # rows and columns of the product with which a BLAS is timed


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    value: str
    problem: str | None = None  # what is wrong, and what to do about it
    grade: str = "wrong"  # what a problem makes of the installation; or ``slow``, ``inexact``


def diagnose() -> list[Finding]:
    """All findings, in the order in which they are shown."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return [
        Finding("system", f"{system}, Python {platform.python_version()}"),
        *_versions(), _device(), *_blas(), _precision(), _limits(), *_translators(), *_disks(),
        *_hub(),
    ]  # fmt: skip


def _versions() -> Iterator[Finding]:
    """MLX builds share one file: the last one wins, and removing one breaks another."""
    builds = [name for name in BACKENDS if measure.installed(name)]
    clash = (
        f"{' and '.join(builds)} own the same libmlx; keep one: pip uninstall -y "
        f"{' '.join(builds)}, then install that one anew"
    )
    told = ", ".join(builds) or "none beside mlx itself"
    yield Finding("MLX builds", told, clash if len(builds) > 1 else None)
    for name, bounds in _tested().items():
        found, install = measure.installed(name), f'pip install "{name}{bounds}"'
        if found is None:
            yield Finding(name, "not installed", f"install it: {install}")
            continue
        right = Version(found) in Requirement(f"{name}{bounds}").specifier
        problem = None if right else f"{found} is not among the tested {bounds}: {install}"
        yield Finding(name, f"{found} (tested {bounds})", problem)
    for name in OTHERS:
        yield Finding(name, measure.installed(name) or "not installed (optional)")


def _tested() -> dict[str, str]:
    """The packages and versions that the package's metadata require; a bare checkout has none."""
    try:
        wanted = map(Requirement, metadata.requires("kvlingo-mlx") or [])
    except metadata.PackageNotFoundError:
        return {}
    here = [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    return {r.name: str(r.specifier) for r in here}


def _device() -> Finding:
    """The default device, tested by one product."""
    problem = None
    try:
        if mx.matmul(mx.ones((4, 8)), mx.ones((8, 4))).sum().item() != 128.0:
            problem = "it computes a product wrongly; install MLX anew"
    except RuntimeError as error:
        problem = f"it does not compute ({error}); install MLX anew"
    return Finding("device", str(mx.default_device()), problem)


def _blas() -> Iterator[Finding]:
    """The BLAS that MLX uses on a CPU, and its speed."""
    name = blas.in_effect()
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


def _precision() -> Finding:
    """Whether float32 products are computed in float32."""
    error = float32_error()
    told = (
        f"errors of {error:.0e} where float32 has 1e-06: MLX multiplies in TF32; leave {TF32} out, "
        "or set it to 0, before Python starts"
    )
    value = f"error {error:.0e} ({TF32}={os.environ.get(TF32)})"
    return Finding("float32 products", value, told if error > EXACT else None, "inexact")


def _limits() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < LEAST_FILES
    problem = f"too few for models in many files: ulimit -n {LEAST_FILES * 4}" if few else None
    return Finding("open files", f"at most {soft} (hard limit {hard})", problem)


def _translators() -> Iterator[Finding]:
    """The store's folders, each read as an import does, and the remains of killed processes."""
    root = store()
    folders = sorted(p for p in root.glob("*") if p.is_dir()) if root.is_dir() else []
    count = sum(not p.name.startswith(".") for p in folders)
    yield Finding("store", f"{root}, {count} translators")
    for folder in folders:
        size = f"{sum(p.stat().st_size for p in folder.rglob('*') if p.is_file()) / 1e6:,.1f} MB"
        yield Finding(folder.name, size, _damage(folder))


def _damage(folder: Path) -> str | None:
    if (folder / "old").is_dir():
        return f"it may be a translator's only copy: move {folder / 'old'} back to its name"
    if folder.name.startswith("."):
        return f"a stopped import left it: rm -r {folder}"
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
    value = "offline (HF_HUB_OFFLINE): only what is in its cache is used"
    if not constants.HF_HUB_OFFLINE:
        reached = "reached" if _reach(constants.ENDPOINT) else "not reached"
        value = f"{reached}, what is in its cache is used either way"
    yield Finding("Hub", value)
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
