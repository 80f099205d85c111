"""Load models: one alone, or several after a check that everything fits into memory."""

import contextlib
import os
from collections.abc import Sequence
from importlib import metadata

from kvlingo_mlx.arguments import checked
from kvlingo_mlx.caches import memory
from kvlingo_mlx.errors import MissingModelError, UnsupportedModelError, printable
from kvlingo_mlx.loading.hub import MODEL_FILES, resolve
from kvlingo_mlx.loading.notes import tell
from kvlingo_mlx.loading.opening import open_model, read_weights
from kvlingo_mlx.loading.translators import translator_bytes
from kvlingo_mlx.machines import here
from kvlingo_mlx.machines import shard as shard_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Prompt, encode
from kvlingo_mlx.remote.address import address_of
from kvlingo_mlx.remote.model import RemoteModel, connect
from kvlingo_mlx.translators.base import Translator

TENSOR = "tensor"  # the one way in which models are sharded
Model = str | os.PathLike[str] | LanguageModel


@checked
def load(
    path_or_hf_repo: str | os.PathLike[str] | LanguageModel,
    *,
    revision: str | None = None,
    lazy: bool = False,
    shard: str | None = None,
) -> LanguageModel:
    """Load a model and its tokenizer; a model that is already loaded is returned unchanged.

    Args:
        path_or_hf_repo: A folder, a Hub id, the name of an embedded model, or a ``LanguageModel``.
        revision: A branch, tag or commit of a Hub id.
        lazy: Whether to read each weight only when it is first needed.
        shard: ``tensor``: in a program that ``mlx.launch`` started on several machines, load this
            one's heads of every layer alone. Such models are for ``generate``, ``hand_over`` and
            ``Conversation``.

    Raises:
        ValueError: ``revision`` is given for a folder, an embedded or a loaded model, or ``lazy``
            for a loaded model; or the machines cannot share the model.
        MissingModelError: There is no such folder or repository, or files are missing or damaged.
        UnsupportedModelError: The family is not supported, or mlx-lm misreads its config.
        NotEnoughMemoryError: The weights are larger than the memory there is.
    """
    if isinstance(path_or_hf_repo, LanguageModel):
        return path_or_hf_repo
    model = _unread(path_or_hf_repo, revision)
    if shard is not None:
        model = shard_of(model, _unread(path_or_hf_repo, revision))
    if not lazy:
        memory.check({f"weights of {model.name}": memory.weights_bytes(model)})
        read_weights(model)
    return model


def load_together(
    models: Sequence[Model],
    prompt: Prompt | None = None,
    *,
    translator: Translator | str | os.PathLike[str] | None = None,
) -> list[LanguageModel]:
    """Load several models, after a check that everything they need fits into memory.

    Args:
        models: As for :func:`load`; loaded models are returned unchanged, and a name that comes
            twice is loaded once. The prompt is tokenised by the last one's tokenizer.
        prompt: The prompt they will read; if it is given, its caches and the translator count too.
        translator: The translator from the first to the last model; None: the stored one, if any.

    Raises:
        ValueError: The prompt is empty or cannot be rendered.
        NotEnoughMemoryError: The message gives the needed and the available memory; no weights
            were read.
        MissingModelError, UnsupportedModelError: As for :func:`load`.
    """
    paths = {os.fspath(m): m for m in models if not isinstance(m, LanguageModel)}
    unread = {name: _unread(path, None) for name, path in paths.items()}
    opened = [m if isinstance(m, LanguageModel) else unread[os.fspath(m)] for m in models]
    if unread:
        read_together(list(unread.values()), opened, prompt, translator)
    return opened


def read_together(
    unread: Sequence[LanguageModel],
    models: Sequence[LanguageModel],
    prompt: Prompt | None = None,
    translator: Translator | str | os.PathLike[str] | None = None,
) -> None:
    """Read the weights of models, after a check that everything fits into memory.

    Args:
        unread: Those of ``models`` whose weights are not read yet.
        models: All models, which count with their caches of the prompt.
        prompt: The prompt, if its caches and the translator count too.
        translator: As for :func:`load_together`.

    Raises:
        NotEnoughMemoryError: No weights were read.
    """
    parts: dict[str, int] = {}
    for model in unread:
        title = f"weights of {model.name}"
        parts[title] = parts.get(title, 0) + memory.weights_bytes(model)
    if prompt is not None:
        tokens = len(encode(models[-1], prompt))
        parts["translator"] = translator_bytes(translator, models[0], models[-1])
        parts[memory.caches_of(tokens)] = sum(memory.cache_bytes(m, tokens) for m in models)
    memory.check(parts)
    for model in unread:
        read_weights(model)


def load_pair(
    prefill_model: Model,
    decode_model: Model,
    prompt: Prompt | None = None,
    *,
    translator: Translator | str | os.PathLike[str] | None = None,
    native: bool = False,
) -> tuple[LanguageModel, LanguageModel]:
    """Load two models together; with ``native``, the first one's weights are not needed."""
    if native:
        if not isinstance(prefill_model, LanguageModel):
            prefill_model = load(prefill_model, lazy=True)
        return prefill_model, load(decode_model)
    models = prefill_model, decode_model
    source, target = load_together(models, prompt, translator=translator)
    return source, target


def open_sharded(paths: Sequence[str], names: Sequence[str] = ()) -> dict[str, LanguageModel]:
    """Open models, with their weights unread; under ``mlx.launch`` all machines hold some together.

    Args:
        paths: All models, each a folder or Hub id.
        names: Those that are held together; none: the largest.

    Raises:
        ValueError, UnsupportedModelError: They cannot be shared, or there are no other machines.
    """
    opened = {path: load(path, lazy=True) for path in paths}
    if not names and here().several:
        names = [max(opened, key=lambda path: memory.weights_bytes(opened[path]))]
    return opened | {path: load(path, lazy=True, shard=TENSOR) for path in names}


def open_pair(source: str, target: str, prompt: Prompt) -> tuple[LanguageModel, LanguageModel]:
    """Open a source and a target that all machines hold together, with their weights unread.

    The source is whole on every machine, which needs no messages; where it does not fit so and can
    be shared, each holds some of its heads, too.

    Raises:
        ValueError, UnsupportedModelError: As for :func:`open_sharded`.
    """
    opened = open_sharded(list(dict.fromkeys((source, target))), [target])
    pair = opened[source], opened[target]
    if source == target:
        return pair
    tokens, free = len(encode(pair[1], prompt)), memory.free()
    need = sum(memory.weights_bytes(m) + memory.cache_bytes(m, tokens) for m in pair)
    if not all(here().gathered(free is None or need <= free)):
        with contextlib.suppress(ValueError, UnsupportedModelError):
            return load(source, lazy=True, shard=TENSOR), pair[1]
    return pair


def reached(prefill_model: Model, strategy: str) -> Model:
    """A prefill model that may be on another machine: connected to, if it is an address.

    Raises:
        ValueError: The strategy does not need it.
        RemoteModelError: As for :func:`connect`.

    Warns:
        KVLingoWarning: The other machine has another mlx-lm, by which a model might run otherwise.
    """
    remote = address_of(prefill_model)
    if strategy == "native" and (remote or isinstance(prefill_model, RemoteModel)):
        raise ValueError(
            f"strategy is 'native', which does not need {prefill_model!r:.80}; give the prefill "
            "model's folder or Hub id, or strategy accelerator"
        )
    found = prefill_model if remote is None else connect(str(prefill_model))
    here = metadata.version("mlx-lm")
    if isinstance(found, RemoteModel) and found.mlx_lm != here:
        told = f"{found.address} runs mlx-lm {printable(found.mlx_lm):.40}, and this is {here}"
        tell(told, f"{told}: {found.name} may give other states there than it would here")
    return found


def _unread(path_or_hf_repo: str | os.PathLike[str], revision: str | None) -> LanguageModel:
    """A model whose weights have not been read from their files yet."""
    name = os.fspath(path_or_hf_repo)
    path, commit = resolve(name, revision, MODEL_FILES, MissingModelError)
    return open_model(path, name, commit)


def at_hand(name: str, revision: str | None = None) -> LanguageModel:
    """A model that is already on this machine, with its weights unread; the Hub is not asked.

    Args:
        name: As for :func:`load`.
        revision: The preferred snapshot; if it is not on this machine, another one is used.

    Raises:
        MissingModelError: The model is not on this machine, or is damaged.
        UnsupportedModelError: Its family is not supported.
    """
    for wanted in (revision, None):
        try:
            path, commit = resolve(name, wanted, MODEL_FILES, MissingModelError, offline=True)
        except MissingModelError:
            continue
        return open_model(path, name, commit)
    raise MissingModelError(f"{name} is not on this machine")
