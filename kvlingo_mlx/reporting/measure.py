"""Stopwatch, environment and records, so that every printed number can be traced to a run.

Only functions that time MLX import it, so a machine with PyTorch alone can keep records too.
"""

import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx import blas
from kvlingo_mlx.version import __version__

SCHEMA = 1
PACKAGES = ("mlx", "mlx-lm", "numpy", "torch", "transformers")


def seconds(action: Callable[[], Any]) -> float:
    """The wall seconds of ``action``; work that was queued before is finished first."""
    from kvlingo_mlx.backend import mx

    from mlx_lm.generate import generation_stream

    mx.synchronize(generation_stream)  # of mlx-lm's loop, which leaves an unused step running
    mx.synchronize()
    start = time.perf_counter()
    action()
    mx.synchronize()
    return time.perf_counter() - start


def median(samples: Sequence[float]) -> float:
    """The median, which is the number to quote for repeated samples."""
    return float(np.median(samples))


def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """The machine and the versions; no host name, no path.

    ``float32_error`` is that of one product of MLX (:func:`kvlingo_mlx.backend.float32_error`),
    ``tf32`` the variable by which MLX would multiply in TF32; both None without MLX.
    """
    usable = getattr(os, "sched_getaffinity", None)  # not on macOS
    found = {package: installed(package) for package in PACKAGES}
    versions = {"kvlingo-mlx": __version__, "python": platform.python_version()}
    versions |= {package: version for package, version in found.items() if version is not None}
    return {
        "device": _device(),
        "chip": _chip(),
        "cores": len(usable(0)) if usable else os.cpu_count(),
        "fast_blas": blas.in_effect(),
        "system": f"{platform.system()} {platform.machine()}",
        "cuda": _cuda(),
        **_exactness(),
        "versions": versions,
    }


def _exactness() -> dict[str, Any]:
    if _device() is None:
        return {"tf32": None, "float32_error": None}
    from kvlingo_mlx.backend import TF32, float32_error

    return {"tf32": os.environ.get(TF32), "float32_error": float32_error()}


def is_apple() -> bool:
    """Whether this machine is Apple silicon, so that its numbers may be reported as such."""
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def machine_line() -> str:
    """The environment in one line, for use under a table."""
    env = environment()
    versions = ", ".join(f"{name} {v}" for name, v in env["versions"].items())
    blas = "" if env["fast_blas"] is None else f", {env['fast_blas']}"
    cuda = "" if env["cuda"] is None else f", {env['cuda']}"
    device = "" if env["device"] is None else f", {env['device']}"
    return f"{env['chip']}, {env['cores']} cores, {env['system']}{device}{blas}{cuda}; {versions}"


def record(kind: str, config: dict[str, Any], results: Any) -> dict[str, Any]:
    """One measurement, with everything that is needed to repeat it."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment(),
        "config": config,
        "results": results,
    }


def plain(value: Any) -> Any:
    """Dataclasses, dicts, arrays and lists as JSON values; None for numbers that are not finite."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_json(path: str, entry: dict[str, Any]) -> None:
    """Append a record as one line to a file, or write it to standard output for ``-``."""
    line = json.dumps(plain(entry)) + "\n"
    if path == "-":
        sys.stdout.write(line)
        return
    with open(path, "a", encoding="utf-8") as file:
        file.write(line)


def _device() -> str | None:
    """The device on which MLX computes; None if MLX was not imported."""
    core = sys.modules.get("mlx.core")
    return None if core is None else str(core.default_device())


def _chip() -> str:
    core = sys.modules.get("mlx.core")
    info = core.device_info() if core and core.default_device() == core.gpu else {}
    if "device_name" in info:
        return str(info["device_name"])
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cuda() -> str | None:
    """The GPU on which PyTorch computes; None if PyTorch was not imported or has no GPU."""
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None
