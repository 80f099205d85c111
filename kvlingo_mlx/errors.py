"""Errors that users can act on: each message says what was found, expected, and next."""

from __future__ import annotations

from pathlib import Path


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


class MissingProfileError(KVLingoError):
    """No profile of this pair on this machine, where the quickest way was to be chosen by one."""


class MalformedProfileError(KVLingoError):
    """A profile's file that breaks its format (the message names the file)."""


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
