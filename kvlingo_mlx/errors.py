"""Errors that users can act on: each message says what was found, what was expected, what to do."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any


class KVLingoError(Exception):
    """Base of every error that this package raises on purpose, except for wrong arguments."""


class MissingModelError(KVLingoError):
    """A model folder or Hub repository is absent, incomplete or damaged."""


class UnsupportedModelError(KVLingoError):
    """A model's family, or one of its layers, cannot be captured, written or used as asked."""


class IncompatibleTranslatorError(KVLingoError):
    """A valid translator was made for another pair of models or another tokenizer."""


class MalformedTranslatorError(KVLingoError):
    """A translator folder breaks its format (the message names the file)."""


class MissingTranslatorError(KVLingoError):
    """No translator for this pair was found where it was looked for."""


class PublishingError(KVLingoError):
    """The Hub refused an upload, or could not be reached."""


class RemoteModelError(KVLingoError):
    """A model on another machine cannot be reached, refuses, or sends what is wrong."""


class MissingTimingsError(KVLingoError):
    """The faster way was to be chosen by timings, but this machine has none of this pair."""


class MalformedTimingsError(KVLingoError):
    """A file of timings breaks its format (the message names the file)."""


class MalformedConversationError(KVLingoError):
    """A saved conversation's folder is absent, of another version, or damaged."""


class CacheError(KVLingoError, ValueError):
    """A key-value cache is not one from which its model can continue."""


class NotEnoughMemoryError(KVLingoError):
    """Models, a translator and caches need more memory than there is."""


class MissingExtraError(KVLingoError):
    """A feature's optional dependencies are not installed."""


class KVLingoWarning(UserWarning):
    """A message that users should see although nothing is refused; shown once per process."""


@contextlib.contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Turn the error of an import that fails into one that names the extra to install."""
    try:
        yield
    except ImportError as error:
        missing = f"({error.name} is missing)"
        raise MissingExtraError(f'{what} {missing}: pip install "kvlingo-mlx[{extra}]"') from None


def malformed(path: Path, text: str) -> MalformedTranslatorError:
    """The error that refuses a translator's file; its text is one printable line."""
    return MalformedTranslatorError(printable(f"{path}: {text:.400}"))


def printable(text: str) -> str:
    """A text from outside as one line without control codes."""
    return "".join(c if c.isprintable() else "?" for c in text)


# ---- names that have changed ---------------------------------------------------------------------

OLD_NAMES = {
    "MissingProfileError": "MissingTimingsError",
    "MalformedProfileError": "MalformedTimingsError",
}


def tell_new_name(old: str, new: str) -> None:
    """Warn (KVLingoWarning) that a name has changed, at the line that uses it."""
    text = f"{old} is now called {new}; the old name works for one release"
    warnings.warn(text, KVLingoWarning, stacklevel=3)


if not TYPE_CHECKING:  # type checkers must report an old name as an error

    def __getattr__(name: str) -> Any:
        if name not in OLD_NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        tell_new_name(name, OLD_NAMES[name])
        return globals()[OLD_NAMES[name]]
