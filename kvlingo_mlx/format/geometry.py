"""Facts that determine the shape of a model's key-value cache; no MLX and no PyTorch.

Both runtimes describe a checkpoint by the same facts, so a translator made in one runtime is
recognised by the other (docs/reference/translator-format.md, "Fingerprints").
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format.typed import WRITTEN

RULES = ("gated_delta", "mamba2", "short_conv")  # recurrences that take the place of attention
Attention = Literal["full", "sliding", "latent", "gated_delta", "mamba2", "short_conv"]
# What files may say of a model: lists are made of it.
MAX_LAYERS, MAX_HEADS, MAX_DIM, MAX_WINDOW = 1024, 1024, 65536, 2**31
Heads = Annotated[int, range(1, MAX_HEADS + 1)]
Width = Annotated[int, range(1, MAX_DIM + 1)]
# Settings that transformers 5 moved from the top level of a config into ``rope_parameters``.
LIFTED = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")

CONTEXTS = ("max_position_embeddings", "original_max_position_embeddings")

DYNAMIC = (
    "dynamic NTK RoPE rotates a key differently as the text grows, so a cache cannot be written "
    "once; use a model with another RoPE scaling"
)


@dataclass(frozen=True)
class RopeSpec:
    """How a layer rotates its keys, described in the same way for every dialect of configs.

    ``scaling`` holds the parameters of a scaled variant as sorted (name, value) pairs. Its numbers
    are floats and its lists are tuples.
    """

    type: str
    base: float
    dims: int
    traditional: bool = False
    scaling: tuple[tuple[str, Any], ...] = ()


def configured_rope(config: Mapping[str, Any], dims: int, *, traditional: bool = False) -> RopeSpec:
    """The rotation that a raw ``config.json`` asks for, over ``dims`` numbers per head.

    Equal rotations get equal descriptions, however a config spells them: 4 equals 4.0, and linear
    scaling by 1 is no scaling.

    Raises:
        UnsupportedModelError: The rotation depends on the length of the text.
    """
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling")
    scaling = parameters if scaling is None else scaling
    base = float(config.get("rope_theta") or parameters.get("rope_theta") or 10000.0)
    # If a config has both names, "type" goes first, as in mlx-lm.
    kind = scaling.get("type") or scaling.get("rope_type") or "default"
    ignored = ("rope_type", "type", "rope_theta")
    rest = {k: _plain(v) for k, v in scaling.items() if k not in ignored and v is not None}
    if kind == "default" or (kind == "linear" and rest.get("factor") == 1.0):
        return RopeSpec("default", base, dims, traditional)
    if kind == "dynamic":
        raise UnsupportedModelError(DYNAMIC)
    if kind in ("longrope", "su"):  # the gain follows from two lengths at the config's top level
        lengths = {name: config[name] for name in CONTEXTS if config.get(name)}
        rest = {name: _plain(v) for name, v in lengths.items()} | rest
    return RopeSpec(kind, base, dims, traditional, scaling=tuple(sorted(rest.items())))


def check_rotation(text: Mapping[str, Any]) -> None:
    """Refuse a raw config whose rotation depends on the length of the text.

    The config itself is checked, because mlx-lm silently ignores dynamic scaling in some families:
    the model would run with other angles than it was trained with.

    Raises:
        UnsupportedModelError: ``rope_scaling`` or ``rope_parameters`` is dynamic, for all layers
            or for one kind of layer.
    """
    for name in ("rope_scaling", "rope_parameters"):
        found = text.get(name)
        if not isinstance(found, Mapping):
            continue
        for part in (found, *found.values()):
            if isinstance(part, Mapping) and "dynamic" in (part.get("type"), part.get("rope_type")):
                raise UnsupportedModelError(DYNAMIC)


def spelled_out(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings in transformers 5's ``rope_parameters``, by their older names at the top level.

    In most families mlx-lm silently ignores ``rope_parameters`` and rotates by its defaults. The
    result is empty if the parameters differ by kind of layer: only a family can read those.
    """
    kind = (parameters or {}).get("rope_type") or (parameters or {}).get("type")
    if parameters is None or kind is None:
        return {}
    found = {name: parameters[name] for name in LIFTED if name in parameters}
    if kind != "default":
        found["rope_scaling"] = {**parameters, "rope_type": kind, "type": kind}
    return found


def layer_period(layer_types: Sequence[str]) -> int | None:
    """The period of global layers: every how many layers one comes; None if they are irregular."""
    period = [*layer_types, "full_attention"].index("full_attention") + 1
    regular = all(
        (kind == "full_attention") == ((index + 1) % period == 0)
        for index, kind in enumerate(layer_types)
    )
    return period if regular else None


def _plain(value: Any) -> Any:
    """A parameter in the form in which it is compared: numbers as floats, lists as tuples."""
    if isinstance(value, list | tuple):
        return tuple(_plain(v) for v in value)
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


@dataclass(frozen=True)
class Recurrence:
    """The shape of what a recurrent layer keeps of a text, whatever the text's length.

    That is a tail, the last ``kernel - 1`` inputs of its convolution, and a state of
    ``value_heads`` matrices (``value_dim``, ``key_dim``). A layer that is a convolution alone has
    no state: its ``key_heads`` and ``key_dim`` are 0. In Mamba-2's terms, key heads are groups and
    ``key_dim`` is the width of a state.
    """

    key_heads: Annotated[int, range(MAX_HEADS + 1)]
    value_heads: Heads
    key_dim: Annotated[int, range(MAX_DIM + 1)]
    value_dim: Width
    kernel: Annotated[int, range(2, MAX_DIM + 1)]

    @property
    def channels(self) -> int:
        """The numbers a token that enter the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def gates(self, rule: str) -> int:
        """The numbers a token that enter the gates; of a convolution alone, its other factor."""
        by_rule = {"gated_delta": 2 * self.value_heads, "mamba2": self.value_heads}
        return by_rule.get(rule, self.channels)

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of what is kept, without the batch: the tail, and the state if any."""
        tail = self.kernel - 1, self.channels
        state = self.value_heads, self.value_dim, self.key_dim
        return (tail, state) if self.key_dim else (tail,)


@dataclass(frozen=True)
class LayerGeometry:
    """One layer that owns a cache; ``layer`` is its index in the model.

    Where it is recurrent, its "keys" are the inputs of its convolution and its "values" those of
    its gates, as one head each (docs/reference/translator-format.md, "Recurrent layers").
    """

    layer: Annotated[int, range(MAX_LAYERS + 1)]
    kv_heads: Heads
    key_dim: Width
    value_dim: Width
    attention: Attention = field(default="full", metadata=WRITTEN)
    window: Annotated[int, range(1, MAX_WINDOW + 1)] | None = field(default=None, metadata=WRITTEN)
    recurrence: Recurrence | None = None

    @property
    def attends(self) -> bool:
        """Whether queries gather from the layer's entries."""
        return self.recurrence is None

    @property
    def reach(self) -> int | None:
        """The last tokens of a text on which the layer's cache depends; None for all of them."""
        if self.recurrence is not None and len(self.recurrence.parts) == 1:
            return self.recurrence.kernel - 1
        return self.window

    def late(self, side: str) -> tuple[range, int] | None:
        """The numbers of a side that only a span's last tokens need, and how many tokens; or None.

        They are in a tail, and no state depends on them: the queries of a delta rule, which come
        first, and Mamba-2's C, which comes last.
        """
        found = self.recurrence
        if found is None or side != "keys" or not found.key_dim:
            return None
        count, end = found.key_heads * found.key_dim, found.channels
        rows = range(count) if self.attention == "gated_delta" else range(end - count, end)
        return rows, found.kernel - 1

    @property
    def facts(self) -> dict[str, Any]:
        """The fields as JSON has them; those of attention are what they were in version 1."""
        found = asdict(self)
        if self.recurrence is None:
            del found["recurrence"]
        return found

    def width(self, side: str) -> int:
        """The width of a token's ``"keys"`` or ``"values"``, all heads stacked."""
        return self.kv_heads * self.head_dim(side)

    def head_dim(self, side: str) -> int:
        """The width of one head's ``"keys"`` or ``"values"``."""
        return self.key_dim if side == "keys" else self.value_dim


@dataclass(frozen=True)
class CacheGeometry:
    """The shape of a loaded model's cache."""

    model_type: str
    layers: tuple[LayerGeometry, ...]
    rope: tuple[RopeSpec | None, ...]
    norm_eps: float
    embedding_rows: int

    @property
    def fingerprint(self) -> str:
        """Sha256 of the canonical JSON of these facts."""
        return digest_of(self.facts)

    @property
    def facts(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return {**asdict(self), "layers": [layer.facts for layer in self.layers]}

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state in place of keys and values."""
        return any(layer.recurrence is not None for layer in self.layers)

    def first_kept(self, num_tokens: int) -> list[int]:
        """The first of ``num_tokens`` positions on which each cache layer still depends."""
        return [max(0, num_tokens - (g.reach or num_tokens)) for g in self.layers]


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal facts give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def digest_of(value: Any) -> str:
    """Sha256 of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Sha256 of a vocabulary (token to id, added tokens included), sorted by id."""
    entries = sorted((index, token) for token, index in vocabulary.items())
    return digest_of(entries)


def layer_differences(
    found: tuple[LayerGeometry, ...], expected: tuple[LayerGeometry, ...]
) -> list[str]:
    """Describe each field in which two lists of layers differ, at the first layer that differs."""
    if len(found) != len(expected):
        return [f"cache layers: {len(found)}, expected {len(expected)}"]
    differences = {}
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        wanted = asdict(b)
        for name, value in asdict(a).items():
            if value != wanted[name] and name not in differences:
                told = f"{name} of layer {index}: {value}, expected {wanted[name]}"
                differences[name] = told
    return list(differences.values())
