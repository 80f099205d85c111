"""What identifies a model's files, whichever runtime loads them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kvlingo_mlx.format.geometry import canonical_json
from kvlingo_mlx.format.norms import header_of
from kvlingo_mlx.format.projections import OF_THE_FILE

READ = 1024  # bytes of a tensor that are read at its beginning, in its middle, and at its end


def files_fingerprint(folder: Path) -> str:
    """Sha256 of a model folder's config, the layout of its weights, and parts of every tensor.

    A few milliseconds, where reading every weight takes a second for each 2 GB. A fine-tune or a
    fused adapter changes whole tensors.

    Raises:
        ValueError: A file of weights is damaged.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    facts = {name: value for name, value in config.items() if name not in OF_THE_FILE}
    digest = hashlib.sha256(canonical_json(facts).encode())
    for path in sorted(folder.glob("model*.safetensors")):
        with path.open("rb") as file:
            length, header, tensors = header_of(path, file)
            digest.update(path.name.encode() + header)
            for _, tensor in sorted(tensors.items()):
                start, stop = (8 + length + offset for offset in tensor["data_offsets"])
                middle = (start + stop - READ) // 2
                for place in (start, max(start, middle), max(start, stop - READ)):
                    file.seek(place)
                    digest.update(file.read(min(READ, stop - place)))
    return digest.hexdigest()
