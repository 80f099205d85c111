"""Check and open a model's folder; its weights stay in their files until they are needed."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx, nn

from huggingface_hub.errors import StrictDataclassError
from mlx_lm.utils import load_config, load_model, load_tokenizer
from safetensors import SafetensorError, safe_open
from transformers.utils import logging as transformers

from kvlingo_mlx.embedded import MODELS
from kvlingo_mlx.errors import MissingModelError
from kvlingo_mlx.families import family_of
from kvlingo_mlx.format import misread
from kvlingo_mlx.loading.hub import model_type
from kvlingo_mlx.loading.notes import tell
from kvlingo_mlx.machines import shard_module
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.phases import counted
from kvlingo_mlx.threads import for_any_thread, working

# What libraries raise for files that are damaged, and for whole ones with which they cannot do.
DAMAGED = (OSError, RuntimeError, json.JSONDecodeError, SafetensorError)
REJECTED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    StrictDataclassError,
)

_LOADING = threading.Lock()  # what transformers logs is settled for the whole process
# The name under which a tokenizer of transformers keeps whether it has warned of a long text.
TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"


def open_model(path: Path, name: str, commit: str | None) -> LanguageModel:
    """The model in a folder, with its weights unread.

    Args:
        path: The folder.
        name: The name by which the user asked for it.
        commit: The Hub's commit if it came from there.

    Raises:
        MissingModelError: Files are missing or damaged.
        UnsupportedModelError: The family is not supported, or mlx-lm misreads the config.

    Warns:
        KVLingoWarning: The model was trained with a window or short factors that mlx-lm ignores.
    """
    family = family_of(model_type(path))
    _check_files(path)
    with damage_told(path):
        config = load_config(path)
        model, config = _unread_module(path, family.overrides(config))
    with damage_told(path, "the tokenizer of "), _quiet_about_configs():
        tokenizer = load_tokenizer(
            path, {"trust_remote_code": False}, eos_token_ids=config.get("eos_token_id")
        )
    embedded = path.parent == MODELS
    # Texts are measured before they are cut, and a prompt that is too long is refused by us.
    getattr(tokenizer._tokenizer, "deprecation_warnings", {})[TOO_LONG] = True
    found = LanguageModel(model, tokenizer, config, path.name if embedded else name, commit, path)
    _tell_of_misreading(found)
    return found


def _tell_of_misreading(model: LanguageModel) -> None:
    """Warn of a window or of short factors of a model's training that mlx-lm ignores."""
    text = model.config.get("text_config", model.config)
    short = misread.long_factors_from(model.family.text_type(model.facts), text)
    if short is not None:
        tell(
            f"factors of {model.name}",
            f"{model.name} was trained to rotate texts of at most {short} tokens by short_factor, "
            "and mlx-lm rotates every text by long_factor: answers to shorter ones may be worse "
            "than in other software",
        )
    window = model.ignored_window
    if window is not None:
        tell(
            f"window of {model.name}",
            f"{model.name} was trained to see the last {window} tokens in some or all of its "
            f"layers, and mlx-lm's {model.geometry.model_type} ignores this window: texts beyond "
            f"{window} tokens are refused, shorter ones are answered correctly",
        )


def read_weights(model: LanguageModel, between: Callable[[], None] = lambda: None) -> None:
    """Read the weights that are still in a model's files; ``between`` is called meanwhile.

    Raises:
        MissingModelError: The files are missing or damaged.
        UnsupportedModelError: MLX cannot run the model on this device; nothing was read.
    """
    model.check_device()
    modules = model.model.modules()[::-1]  # the inner ones first
    with damage_told(model.path), working():
        for module in counted(f"reading the weights of {model.name}", modules):
            mx.eval(dict(module))  # also RoPE, which has no parameters
            between()


def let_go(model: LanguageModel) -> None:
    """Free the memory of a model's weights; they are read from its files when next needed.

    Raises:
        MissingModelError: The files are missing or damaged by now; the weights stay in memory.
    """
    assert model.path is not None
    with damage_told(model.path):
        module, _ = _unread_module(model.path, model.family.overrides(model.config))
    if model.group.several:
        shard_module(module)
    model.model.update(module.parameters())


def _unread_module(path: Path, overrides: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """A model's module, with weights that any thread can read later, and its config."""
    with for_any_thread():
        module, config = load_model(
            path, lazy=True, trust_remote_code=False, model_config=overrides
        )
    return module, config


@contextlib.contextmanager
def damage_told(path: Path | None, part: str = "") -> Iterator[None]:
    """Convert errors of mlx-lm, MLX and transformers about a model's files to one line.

    ``part`` says what transformers reads of the model; mlx-lm reads the rest.

    Raises:
        MissingModelError: The message names the folder and what the library said.
    """
    try:
        yield
    except (*DAMAGED, *REJECTED) as error:
        said = " ".join(str(error).split()) or repr(error)
        if isinstance(error, DAMAGED):
            what = "is its download complete?"
        elif part:
            what = "transformers refuses its config.json or tokenizer files; correct them"
        else:
            what = "mlx-lm refuses its config.json or weights; correct them, or download it again"
        raise MissingModelError(
            f"{part}the model {path} cannot be loaded ({type(error).__name__}: {said:.250}); {what}"
        ) from error


@contextlib.contextmanager
def _quiet_about_configs() -> Iterator[None]:
    """Keep out transformers' advice about a config: it reads it for a tokenizer, mlx-lm runs it."""
    with _LOADING:
        level = transformers.get_verbosity()
        transformers.set_verbosity_error()
        try:
            yield
        finally:
            transformers.set_verbosity(level)


def _check_files(path: Path) -> None:
    """Refuse a folder without a tokenizer, or with weights that are missing or cut off."""
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        raise MissingModelError(f"{path} has no tokenizer.json; download the model again")
    index, files = path / "model.safetensors.index.json", sorted(path.glob("model*.safetensors"))
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            files = [path / name for name in sorted(names)]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise MissingModelError(
                f"{index} has no readable weight_map; download the model again"
            ) from None
    if not files:
        raise MissingModelError(f"{path} has no model*.safetensors; download the model again")
    for file in files:
        try:
            with safe_open(file, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise MissingModelError(
                f"{file} is missing or incomplete ({error}); download the model again"
            ) from None
