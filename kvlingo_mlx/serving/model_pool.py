"""A server's models: opened at the start, loaded on demand, unloaded when memory is short."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvlingo_mlx.backend import mx

from kvlingo_mlx.caches import memory
from kvlingo_mlx.engine.folder import describe
from kvlingo_mlx.loading.models import open_sharded
from kvlingo_mlx.loading.opening import let_go, read_weights
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.serving.clock import now
from kvlingo_mlx.serving.messages import ModelInfo


@dataclass
class PooledModel:
    """A model that is offered, under one name or several."""

    path: str  # the folder or Hub id that was given for it
    model: LanguageModel
    weights: int  # bytes
    loaded: bool = False  # whether the weights are in memory
    running: int = 0  # answers that need it now
    used: float = field(default_factory=now)  # last
    read_s: float | None = None  # seconds a token to read a prompt, once measured

    def info(self, name: str) -> ModelInfo:
        """What clients are told of it, by one of its names."""
        context = self.model.context_length
        family = str(self.model.config["model_type"])
        return ModelInfo(name, self.path, context, self.loaded, self.weights, family)

    def took(self, tokens: int, seconds: float) -> None:
        """Learn from a prompt how fast the model reads; short ones tell nothing."""
        if tokens >= 64:
            found = seconds / tokens
            self.read_s = found if self.read_s is None else 0.7 * self.read_s + 0.3 * found


class ModelPool:
    """All offered models by name.

    Opening a model reads its config, tokenizer and the headers of its files, so that conversations
    can have lines of models whose weights are not in memory. Under ``mlx.launch`` the models that
    are named in ``sharded``, by default the largest, are held by all together.

    Raises:
        ValueError: There are no other machines, or they cannot share a model.
        MissingModelError, UnsupportedModelError: A model cannot be opened.
    """

    def __init__(self, models: Mapping[str, str], sharded: Sequence[str] = ()) -> None:
        self.between: Callable[[], None] = lambda: None
        paths = list(dict.fromkeys(models.values()))
        opened = open_sharded(paths, [models[name] for name in sharded])
        self._each = {
            path: PooledModel(path, replace(model, described={}), memory.weights_bytes(model))
            for path, model in opened.items()
        }
        self.all = {name: self._each[path] for name, path in models.items()}

    def __getitem__(self, name: str) -> PooledModel:
        return self.all[name]

    @property
    def models(self) -> dict[str, LanguageModel]:
        return {name: resident.model for name, resident in self.all.items()}

    @property
    def weights(self) -> int:
        """The bytes of all weights in memory."""
        return sum(each.weights for each in self._each.values() if each.loaded)

    def read(self, name: str) -> None:
        """Read a model's weights, if they are not in memory.

        Raises:
            MissingModelError: The files are missing or damaged.
        """
        resident = self.all[name]
        if not resident.loaded:
            read_weights(resident.model, self.between)
            describe(resident.model)  # what is saved later need not read it again
            resident.loaded = True
        resident.used = now()

    def unload(self, name: str) -> int:
        """Let go of a model's weights; return the bytes freed, 0 if an answer needs them."""
        resident = self.all[name]
        if not resident.loaded or resident.running:
            return 0
        let_go(resident.model)
        resident.loaded = False
        mx.clear_cache()
        return resident.weights

    @contextlib.contextmanager
    def asleep(self) -> Iterator[None]:
        """Let go of what is read meanwhile of models that are not loaded, to compare them."""
        unknown = [r.model for r in self._each.values() if not (r.loaded or r.model.described)]
        try:
            yield
        finally:
            for model in unknown:
                if model.described:
                    let_go(model)

    def idle(self, beside: str) -> list[str]:
        """Models whose weights could be let go of for ``beside``, least recently used first."""
        names = {id(resident): name for name, resident in self.all.items()}
        free = [r for r in self._each.values() if r.loaded and not r.running]
        others = sorted((r for r in free if r is not self.all[beside]), key=lambda r: r.used)
        return [names[id(resident)] for resident in others]
