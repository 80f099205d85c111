"""Models, loaded: alone, or together once it is known that all of it fits into memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvlingo_mlx.backend import mx

from kvlingo_mlx.arguments import checked
from kvlingo_mlx.caches import memory
from kvlingo_mlx.errors import (
    MissingModelError,
)
from kvlingo_mlx.loading.hub import MODEL_FILES, resolve
from kvlingo_mlx.loading.opening import damage_told, open_model
from kvlingo_mlx.loading.translators import translator_bytes
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Prompt, encode
from kvlingo_mlx.threads import working
from kvlingo_mlx.translators.base import Translator

Model = str | os.PathLike[str] | LanguageModel


@checked
def load(
    path_or_hf_repo: str | os.PathLike[str] | LanguageModel,
    *,
    revision: str | None = None,
    lazy: bool = False,
) -> LanguageModel:
    """Load a model and its tokenizer; a model that is loaded already is returned as it is.

    Args:
        path_or_hf_repo: A folder, a Hub id, the name of an embedded model, or a ``LanguageModel``.
        revision: Branch, tag or commit of a Hub id.
        lazy: Read each weight when it is first needed.

    Raises:
        ValueError: A revision of a folder, an embedded or a loaded model, which have none; or
            ``lazy`` for a loaded one.
        MissingModelError: No such folder or repository, or files are missing or damaged.
        UnsupportedModelError: The family is not supported, or mlx-lm misreads its config.
        NotEnoughMemoryError: Its weights are larger than the memory there is.
    """
    if isinstance(path_or_hf_repo, LanguageModel):
        if revision is not None:
            raise ValueError(
                f"revision is {revision!r}, but {path_or_hf_repo.name} is loaded already; leave "
                "it out (revision=), or give the model's Hub id"
            )
        return path_or_hf_repo
    model = _unread(path_or_hf_repo, revision)
    if not lazy:
        memory.check({f"weights of {model.name}": memory.weights_bytes(model)})
        _read(model)
    return model


def load_together(
    models: Sequence[Model],
    prompt: Prompt | None = None,
    *,
    translator: Translator | str | os.PathLike[str] | None = None,
) -> list[LanguageModel]:
    """Load several models, once it is known that all they take fits into memory.

    Args:
        models: As for :func:`load`; those that are loaded already are returned as they are. The
            last one's tokenizer reads the prompt.
        prompt: What they will read: caches of it, and the translator, count too.
        translator: Of the first to the last model; None is the stored one, if there is one.

    Raises:
        ValueError: The prompt is empty, or cannot be rendered.
        NotEnoughMemoryError: With what is needed and what there is; no weights were read.
        MissingModelError, UnsupportedModelError: As for :func:`load`.
    """
    opened = [m if isinstance(m, LanguageModel) else _unread(m, None) for m in models]
    unread = [new for m, new in zip(models, opened, strict=True) if m is not new]
    if not unread:
        return opened
    parts: dict[str, int] = {}
    for model in unread:
        title = f"weights of {model.name}"
        parts[title] = parts.get(title, 0) + memory.weights_bytes(model)
    if prompt is not None:
        tokens = len(encode(opened[-1], prompt))
        parts["translator"] = translator_bytes(translator, opened[0], opened[-1])
        parts[memory.caches_of(tokens)] = sum(memory.cache_bytes(m, tokens) for m in opened)
    memory.check(parts)
    for model in unread:
        _read(model)
    return opened


def load_pair(
    prefill_model: Model,
    decode_model: Model,
    prompt: Prompt | None = None,
    *,
    translator: Translator | str | os.PathLike[str] | None = None,
    native: bool = False,
) -> tuple[LanguageModel, LanguageModel]:
    """Two models by :func:`load_together`; ``native``: the first one's weights are not needed."""
    if native:
        if not isinstance(prefill_model, LanguageModel):
            prefill_model = load(prefill_model, lazy=True)
        return prefill_model, load(decode_model)
    models = prefill_model, decode_model
    source, target = load_together(models, prompt, translator=translator)
    return source, target


def _unread(path_or_hf_repo: str | os.PathLike[str], revision: str | None) -> LanguageModel:
    """A model whose weights lie in its files yet."""
    name = os.fspath(path_or_hf_repo)
    path, commit = resolve(name, revision, MODEL_FILES, MissingModelError)
    return open_model(path, name, commit)


def _read(model: LanguageModel) -> None:
    modules = model.model.modules()
    with damage_told(model.path), working():
        mx.eval([dict(module) for module in modules])  # what rotates is no parameter


def at_hand(name: str, revision: str | None = None) -> LanguageModel:
    """A model that is on this machine already, its weights unread; the Hub is not asked.

    Args:
        name: As for :func:`load`.
        revision: The snapshot to prefer; another one will do where it is not here.

    Raises:
        MissingModelError: It is not here, or damaged.
        UnsupportedModelError: Its family is not supported.
    """
    for wanted in (revision, None):
        try:
            path, commit = resolve(name, wanted, MODEL_FILES, MissingModelError, offline=True)
        except MissingModelError:
            continue
        return open_model(path, name, commit)
    raise MissingModelError(f"{name} is not on this machine")
