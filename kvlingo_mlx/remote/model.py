"""A model on another machine: its facts are here, its weights are not."""

import os
from importlib import metadata
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx.arguments import checked
from kvlingo_mlx.errors import RemoteModelError, printable
from kvlingo_mlx.format.fingerprints import Sketch
from kvlingo_mlx.format.geometry import CacheGeometry, LayerGeometry, RopeSpec, digest_of
from kvlingo_mlx.format.tensor_file import STORAGE
from kvlingo_mlx.format.typed import read
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.remote.address import address_of
from kvlingo_mlx.remote.client import API_KEY, Client
from kvlingo_mlx.version import __version__

PATIENCE_S = 10.0
ELSEWHERE = ("model", "tokenizer")


class RemoteModel(LanguageModel):
    """A source that another machine runs; what needs its weights or its tokenizer is refused."""

    def __init__(self, client: Client, facts: dict[str, Any]) -> None:
        """Take the facts that a server has told, which are not to be trusted.

        Raises:
            ValueError, TypeError, KeyError: They are no such facts.
        """
        geometry = geometry_of(facts["geometry"])
        if geometry.fingerprint != facts["fingerprint"] or facts["dtype"] not in STORAGE:
            raise ValueError("facts that do not agree")
        sketch = facts["projections"]
        vars(self).update(
            client=client, digest=digest_of(facts), dtype=facts["dtype"],
            mlx_lm=str(facts["mlx_lm"]),
            config={"model_type": facts["model_type"]},
            name=printable(str(facts["name"])), revision=facts["revision"], geometry=geometry,
            tokenizer_fingerprint=facts["tokenizer"], norms_fingerprint=str(facts["norms"]),
            ignored_window=facts["ignored_window"],
            cache_dtype=getattr(mx, facts["dtype"]),
            projections=None if sketch is None else Sketch(*map(tuple, sketch)),
            context_length=int(facts["context_length"]), bits=facts["bits"],
            precision=str(facts["precision"]),
        )  # fmt: skip
        _ = self.family  # refused here if it is not known

    client: Client  # how that machine is asked
    digest: str  # of its facts
    dtype: Any  # of its keys and values
    mlx_lm: str  # the version by which it runs
    # As its server says, in the place of what LanguageModel asks of the weights:
    context_length: int = 0
    bits: int | None = None
    precision: str = ""
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        """One line."""
        return f"<RemoteModel {self.name} on {self.address}>"

    def __getattr__(self, name: str) -> Any:
        """Refuse what is on the other machine only."""
        if name in ELSEWHERE:
            raise RemoteModelError(
                f"{self.name} is on {self.address}, and its {name} would be needed here; load it "
                "on this machine (a folder or a Hub id)"
            )
        raise AttributeError(name)

    @property
    def address(self) -> str:
        """The machine on which it runs."""
        return str(self.client.address)


@checked
def connect(address: str, *, key: str | None = None, patience: float = PATIENCE_S) -> RemoteModel:
    """A model that `kvlingo-mlx serve-prefill` offers on another machine, as a prefill model.

    Args:
        address: ``host:port``, or ``https://host:port`` where something in between encrypts.
        key: The key that the server asks for; None takes ``KVLINGO_API_KEY`` of the environment.
        patience: Seconds without a byte after which the other machine is given up.

    Returns:
        A prefill model for ``generate``, ``stream_generate`` and ``hand_over``.

    Raises:
        ValueError: ``address`` is none, or another argument is out of range.
        RemoteModelError: The machine cannot be reached, refuses the key, or runs another version.
    """
    found = address_of(address)
    if found is None:
        raise ValueError(
            f"address is {address!r:.80}; give host:port, such as mac-studio.local:8090"
        )
    if not patience > 0:
        raise ValueError(f"patience is {patience}; give a number of seconds above 0")
    client = Client(found, key or os.environ.get(API_KEY) or None, float(patience))
    facts = client.facts()
    version = facts.get("version") if isinstance(facts, dict) else None
    if version is not None and version != __version__:
        raise RemoteModelError(
            f"{found} runs kvlingo-mlx {printable(str(version)):.40}, and this is {__version__}; "
            "install the same version on both machines"
        )
    try:
        return RemoteModel(client, facts)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise client.odd("tells nothing of a model") from None


def facts_of(model: LanguageModel) -> dict[str, Any]:
    """What a server tells of its model."""
    sketch = model.projections
    return {
        "version": __version__,
        "mlx_lm": metadata.version("mlx-lm"),
        "name": model.name,
        "revision": model.revision,
        "model_type": model.config["model_type"],
        "geometry": model.geometry.facts,
        "fingerprint": model.geometry.fingerprint,
        "tokenizer": model.tokenizer_fingerprint,
        "norms": model.norms_fingerprint,
        "projections": None if sketch is None else [sketch.numbers, sketch.scales],
        "context_length": model.context_length,
        "ignored_window": model.ignored_window,
        "dtype": str(model.cache_dtype).rsplit(".", 1)[-1],
        "bits": model.bits,
        "precision": model.precision,
    }


def geometry_of(data: dict[str, Any]) -> CacheGeometry:
    """A geometry as it was before it became JSON; ValueError where a layer is none."""
    rope = (
        None if spec is None else RopeSpec(**{**spec, "scaling": _tuples(spec["scaling"])})
        for spec in data["rope"]
    )
    layers = read(tuple[LayerGeometry, ...], data["layers"], "layers")
    return CacheGeometry(**{**data, "layers": layers, "rope": tuple(rope)})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
