"""Whether a tag, the package's version and the changelog's newest release are one and the same.

python tools/check_release.py v0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version() -> str:
    """What the package says of itself; it is not imported."""
    text = (ROOT / "kvlingo_mlx" / "version.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    return found


def newest() -> str:
    """The first release of CHANGELOG.md below "Unreleased"."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return next(n for n in re.findall(r"^## \[([^\]]+)\]", text, re.MULTILINE) if n[0].isdigit())


def main(tag: str) -> int:
    """0 if all three agree; else 1, with a line that names them."""
    found = {"the tag": tag.removeprefix("v"), "__version__": version(), "CHANGELOG.md": newest()}
    if len(set(found.values())) == 1:
        return 0
    listed = ", ".join(f"{name} has {number}" for name, number in found.items())
    print(f"error: {listed}; they must agree", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
