"""The pair that a bench times: two models, and a translator's maps in several forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import on_gpu

from benchmarks.paper.timing.phases import Layers, layers_of
from kvlingo_mlx.caches import memory
from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.errors import MissingTranslatorError
from kvlingo_mlx.loading.models import load_pair
from kvlingo_mlx.loading.pairing import check_one_tokenizer
from kvlingo_mlx.loading.translators import resolve_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.timing import geometries
from kvlingo_mlx.translators.base import Translator


@dataclass(frozen=True)
class Pair:
    """A pair of models to be timed.

    Attributes:
        source: The model that reads.
        target: The model that answers.
        translators: Translators by form.
        layers: For each model, the measured and the full number of layers; None for whole models.
        notes: Notes that a reader of the numbers needs.
        precision: The precision of random weights; None for models from a folder.
        unstored: Whether the models are real but the maps random, since none are stored.
    """

    source: LanguageModel
    target: LanguageModel
    translators: Mapping[str, Translator]
    layers: Layers = None
    notes: tuple[str, ...] = ()
    precision: str | None = None
    unstored: bool = False

    @property
    def nu(self) -> int:
        """The number of source layers that a target layer reads."""
        return next(iter(self.translators.values())).config.nu

    @property
    def head_mixing(self) -> bool:
        """Whether the translator's maps mix heads."""
        return next(iter(self.translators.values())).config.head_mixing

    @property
    def form(self) -> str:
        """The form of the maps that serve whole ways: a stored translator's is its dtype."""
        form, translator = next(iter(self.translators.items()))
        return translator.dtype if form == "stored" else form

    @property
    def smaller(self) -> LanguageModel:
        """The model with the shorter context, which every prompt must fit."""
        return min((self.source, self.target), key=lambda model: model.context_length)


def of_geometry(
    names: Sequence[str],
    layers: int | None,
    precision: str | None,
    nu: int,
    bits: Sequence[int],
    *,
    tokens: int = 0,
    progress: geometries.Progress = lambda done, total: None,
) -> Pair:
    """Random models of true widths, with random maps in floats and in ``bits``.

    Args:
        names: The names of source and target in ``GEOMETRIES``.
        layers: The number of layers of each; None for all.
        precision: The precision of the weights; None is this machine's usual one.
        nu: The number of source layers that a target layer reads.
        bits: 8 or 4; each adds one form.
        tokens: The most tokens that both caches will hold.
        progress: As for :func:`geometries.make`.

    Raises:
        NotEnoughMemoryError, UnsupportedModelError: As for :func:`geometries.make`.
    """
    precision = precision or ("bfloat16" if on_gpu() else "float32")
    source, target = models = [
        geometries.unmade_model(name, layers, precision, seed) for seed, name in enumerate(names)
    ]
    needs = {
        "maps": geometries.least_maps_bytes(source.geometry.layers, target.geometry.layers, nu),
        memory.caches_of(tokens): sum(memory.cache_bytes(model, tokens) for model in models),
    }
    geometries.make(models, {name: size for name, size in needs.items() if size}, progress)
    translators = geometries.random_translators(source, target, nu, _forms(bits))
    weights, maps = f"random weights in {precision}", f"random maps, nu = {nu}"
    if layers is None:
        return Pair(source, target, translators, notes=(weights, maps), precision=precision)
    first, second = (geometries.GEOMETRIES[name]["num_hidden_layers"] for name in names)
    depths = (layers, first), (layers, second)
    weights += f", {layers_of(layers)} of each model"
    return Pair(source, target, translators, depths, (weights, maps), precision)


def of_models(
    source: str | None,
    target: str | None,
    translator: str | None,
    nu: int,
    bits: Sequence[int],
) -> Pair:
    """Real models; with random maps if no translator is given or stored.

    Raises:
        MissingTranslatorError: There is no translator of the given name.
        IncompatibleTranslatorError: It is between two tokenizers, or of other models.
    """
    models = load_pair(source or zoo("tiny-qwen3-s"), target or zoo("tiny-qwen3-moe"))
    try:
        found = {"stored": resolve_translator(translator, *models)}
        check_one_tokenizer(found["stored"].config, "bench", "give two models of one tokenizer")
        found |= {f"{n} bits": resolve_translator(translator, *models, quantize=n) for n in bits}
    except MissingTranslatorError:
        if translator is not None:
            raise
        maps = geometries.random_translators(*models, nu, _forms(bits))
        return Pair(*models, maps, notes=(f"random maps, nu = {nu}",), unstored=True)
    return Pair(*models, found)


def _forms(bits: Sequence[int]) -> dict[str, tuple[Any, int | None]]:
    """The forms of a translator's maps; 16-bit maps only on a GPU, since a CPU widens them.

    The first one serves whole ways: float32, as in the paper's table of the mixture of experts.
    """
    floats: dict[str, tuple[Any, int | None]] = {"float32": ("float32", None)}
    if on_gpu():
        floats["bfloat16"] = ("bfloat16", None)
    return floats | {f"{number} bits": ("float32", number) for number in bits}
