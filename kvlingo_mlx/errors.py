"""Errors that users can act on: each message says what was found, expected, and next."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any


class KVLingoError(Exception):
    """Base of every error this package raises on purpose, but for wrong arguments."""


class MissingModelError(KVLingoError):
    """A model folder or Hub repository that is absent, incomplete or damaged."""


class UnsupportedModelError(KVLingoError):
    """A model whose family, or a layer of it, cannot be tapped, written or used as asked."""


class IncompatibleTranslatorError(KVLingoError):
    """A sound translator, but for another pair of models or another tokenizer."""


class MalformedTranslatorError(KVLingoError):
    """A translator folder that breaks its format (the message names the file)."""


class MissingTranslatorError(KVLingoError):
    """No translator for this pair where one was looked for."""


class PublishingError(KVLingoError):
    """An upload that the Hub refused, or that did not reach it."""


class MissingTimingsError(KVLingoError):
    """No timings of this pair on this machine, by which the sooner way was to be chosen."""


class MalformedTimingsError(KVLingoError):
    """A file of timings that breaks its format (the message names the file)."""


class MalformedConversationError(KVLingoError):
    """A saved conversation's folder that is absent, of another version, or damaged."""


class CacheError(KVLingoError, ValueError):
    """A key-value cache that is not what its model would go on from."""


class NotEnoughMemoryError(KVLingoError):
    """Models, a translator and caches that take more memory than there is."""


class MissingExtraError(KVLingoError):
    """A feature whose optional dependencies are not installed."""


class KVLingoWarning(UserWarning):
    """What a user should know and is not refused for; each is told once a process."""


def malformed(path: Path, text: str) -> MalformedTranslatorError:
    """The refusal of a translator's file, one printable line whatever the file holds."""
    return MalformedTranslatorError(printable(f"{path}: {text:.400}"))


def printable(text: str) -> str:
    """A stranger's text as one line without control codes."""
    return "".join(c if c.isprintable() else "?" for c in text)


# ---- what has another name now -----------------------------------------------------------------

OLD_NAMES = {
    "MissingProfileError": "MissingTimingsError",
    "MalformedProfileError": "MalformedTimingsError",
}


def tell_new_name(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that something has another name now.

    Warns:
        KVLingoWarning: Always; ``stacklevel`` says whose line it shows.
    """
    text = f"{old} is now called {new}; the old name works for one release"
    warnings.warn(text, KVLingoWarning, stacklevel=stacklevel)


if not TYPE_CHECKING:  # to a checker an old name is an error

    def __getattr__(name: str) -> Any:
        if name not in OLD_NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        tell_new_name(name, OLD_NAMES[name])
        return globals()[OLD_NAMES[name]]
