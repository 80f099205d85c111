"""Write tools/homebrew/kvlingo-mlx.rb: the package with its server, and every wheel that it needs.

    pip install uv packaging
    python tools/make_formula.py              # newer wheels; the own one stays open
    python tools/make_formula.py dist/*.whl   # as released

uv finds the wheels, for the oldest macOS on which MLX runs and for the newest one: MLX has a build
of its own for that.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from check_release import ROOT, version
from packaging import tags, utils

FORMULA = ROOT / "tools" / "homebrew" / "kvlingo-mlx.rb"
PYTHON = "3.13"
SYSTEMS = {"14.0": "on_sequoia :or_older", "26.0": "on_tahoe :or_newer"}
FILES = "https://files.pythonhosted.org/packages"
OPEN = "0" * 64  # where no wheel was given; brew refuses to install that
TEXT = """\
# Written by `python tools/make_formula.py`.
class KvlingoMlx < Formula
  include Language::Python::Virtualenv

  desc "{description}"
  url "{url}", using: :nounzip
  sha256 "{checksum}"
  license "{license}"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@{python}"

{resources}
  def install
    virtualenv_create(libexec, "python{python}")
    resources.each {{ |wheel| wheel.stage {{ (buildpath/"wheels").install Dir["*.whl"] }} }}
    system "python{python}", "-m", "pip", "--python=#{{libexec}}/bin/python", "install",
           "--no-deps", "--no-index", *Dir["wheels/*.whl"], *Dir["*.whl"]
    bin.install_symlink libexec/"bin/kvlingo-mlx"
    generate_completions_from_executable(bin/"kvlingo-mlx", shell_parameter_format: :typer)
  end

  test do
    told = "The home of Paul is Oslo. The hotel of Emma is Lima. What is the hotel of Emma?"
    command = "#{{bin}}/kvlingo-mlx generate tiny-qwen3-s tiny-qwen3-l --prompt"
    assert_match "The hotel of Emma is Lima.", shell_output("#{{command}} '#{{told}}'")
  end
end
"""


def wheels(macos: str) -> dict[str, tuple[str, str]]:
    """The URL and checksum of each package's wheel, for an Apple silicon Mac of this system."""
    command = ["uv", "pip", "compile", "pyproject.toml", "--extra", "server", "--quiet",
               "--python-version", PYTHON, "--python-platform", "aarch64-apple-darwin",
               "--only-binary", ":all:", "--format", "pylock.toml"]  # fmt: skip
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": macos}
    lock = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
    best = fitness(macos)
    found = {}
    for package in tomllib.loads(lock.stdout.decode())["packages"]:
        wheel = min(package["wheels"], key=lambda wheel: best(wheel["url"]))
        found[package["name"]] = wheel["url"], wheel["hashes"]["sha256"]
    return found


def fitness(macos: str) -> Callable[[str], int]:
    """A function that tells how far a wheel is from the best that such a Mac could have."""
    number, systems = tuple(map(int, PYTHON.split("."))), int(macos.split(".")[0])
    platforms = list(tags.mac_platforms((systems, 0), "arm64"))
    known = [
        *tags.cpython_tags(number, platforms=platforms),
        *tags.compatible_tags(number, platforms=platforms),
    ]

    def distance(url: str) -> int:
        own = utils.parse_wheel_filename(url.rpartition("/")[2])[3]
        return min(known.index(tag) for tag in own if tag in known)

    return distance


def resource(name: str, url: str, checksum: str, indent: str = "  ") -> str:
    """A package as Homebrew's own downloads have it."""
    inner = f'  url "{url}", using: :nounzip', f'  sha256 "{checksum}"'
    lines = f'resource "{name}" do', *inner, "end"
    return "".join(f"{indent}{line}\n" for line in lines)


def formula(resources: str, wheel: str | None = None) -> str:
    """The whole text; the wheel is the release's own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    file = f"kvlingo_mlx-{version()}-py3-none-any.whl"
    if wheel and Path(wheel).name != file:
        raise SystemExit(f"error: {wheel} is not {file}; build it anew")
    return TEXT.format(
        description=project["description"].rstrip("."),
        url=f"{FILES}/py3/k/kvlingo-mlx/{file}",
        checksum=hashlib.sha256(Path(wheel).read_bytes()).hexdigest() if wheel else OPEN,
        license=project["license"],
        python=PYTHON,
        resources=resources,
    )


def main(wheel: str | None = None) -> None:
    """Ask for the wheels and write the formula."""
    oldest, newest = (wheels(macos) for macos in SYSTEMS)
    if oldest.keys() != newest.keys():
        some = ", ".join(sorted(oldest.keys() ^ newest.keys()))
        raise SystemExit(f"error: not every macOS needs {some}; write a block for it")
    parts = []
    for name, found in oldest.items():
        if found == newest[name]:
            parts.append(resource(name, *found))
            continue
        for block, own in zip(SYSTEMS.values(), (found, newest[name]), strict=True):
            parts.append(f"  {block} do\n{resource(name, *own, indent='    ')}  end\n")
    FORMULA.write_text(formula("\n".join(parts), wheel), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
