"""Errors that users can act on: each message says what was found, what was expected, what to do."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


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
