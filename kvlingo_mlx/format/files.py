"""Files that strangers wrote: regular ones, and JSON read strictly."""

import hashlib
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import malformed

MAX_CONFIG_BYTES = 2**20
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
PICKLE = "is a pickle, which can run code; only safetensors are read: export it again as such"


def regular_file(path: Path) -> int:
    """The size of a regular file; a missing file or one of another type is refused."""
    if not path.exists():
        for other in sorted(path.parent.iterdir()):
            if other.suffix.lower() in PICKLE_SUFFIXES:
                raise malformed(other, PICKLE)
        raise malformed(path, "is missing; a translator folder needs it (incomplete download?)")
    if path.is_symlink() and not _stays(path):
        raise malformed(
            path, "is a link out of its folder, expected a file; copy the file itself here"
        )
    info = os.stat(path)
    if not stat.S_ISREG(info.st_mode):
        raise malformed(path, "is not a regular file")
    return info.st_size


def _stays(link: Path) -> bool:
    """Whether a link leads into its own folder, or to the blobs of its own Hub snapshot."""
    place, own = link.resolve().parent, link.parent.resolve()
    return place == own or (own.parent.name == "snapshots" and place == own.parents[1] / "blobs")


def read_json(path: Path) -> Any:
    """The contents of a small JSON file; a MalformedTranslatorError says what is wrong with it."""
    regular_file(path)
    with open(path, "rb") as file:
        return parse_json(path, file.read(MAX_CONFIG_BYTES + 1))


def parse_json(path: Path, blob: bytes) -> Any:
    """Parse strict JSON: repeated keys, NaN, Inf and lone surrogates are refused."""
    if len(blob) > MAX_CONFIG_BYTES:
        raise malformed(path, f"is too large; a config has at most {MAX_CONFIG_BYTES} bytes")
    try:
        data = json.loads(
            blob.decode("utf-8"),
            object_pairs_hook=no_duplicates,
            parse_constant=_finite,
            parse_float=_finite,
        )
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise malformed(path, f"is not valid JSON: {error}") from None
    return data


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"key {key!r} appears twice")
        data[key] = value
    return data


def _finite(text: str) -> float:
    value = float(text)  # also parses "NaN" and "Infinity"
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def sha256_of(path: Path) -> str:
    """The sha256 of a file, which is not read into memory at once."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def short(value: Any) -> str:
    """A value that a stranger wrote, for a message: short, on one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
