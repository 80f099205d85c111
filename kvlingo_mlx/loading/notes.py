"""Warnings of translators that may be used anyway, and the commands that messages advise.

A warning is shown once a process; a command is advised only where the pair allows it. ``name`` is
what commands call a translator (``loading.translators.name_of``).
"""

import shlex
import sys
import warnings

from kvlingo_mlx.errors import KVLingoWarning, printable
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.grading import GRADES, UNGRADED, grade_of, receipt_of

_told: set[str] = set()


def tell(key: str | None, text: str) -> None:
    """Warn with ``text``, unless a warning with the same ``key`` was given before; None: anyway."""
    if key is not None and key in _told:
        return
    _told.update(() if key is None else (key,))
    warnings.warn(printable(text), KVLingoWarning, stacklevel=_users_level())


def _users_level() -> int:
    """The stack level, counted from :func:`tell`, of the first caller outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == "kvlingo_mlx":
        level, frame = level + 1, frame.f_back
    return level


def tell_of_grade(config: TranslatorConfig, name: str | None = None, own: bool = False) -> None:
    """Warn of a translator that does not work by its own receipt, or that has no grade.

    ``own`` says whether `tune` may write to its folder. There is no warning if `tune` chose native
    layers, which the receipt does not count.
    """
    receipt, grade, it = receipt_of(config), grade_of(config), called(config, name)
    if receipt is None or receipt.grade == UNGRADED:
        text = f"nobody has measured how much {it} keeps"
        tell(text, f"{text}; {to_measure(config, name)} does")
    elif grade in GRADES[1:]:
        text = f"{it} {'is useless' if grade == GRADES[2] else 'loses a part'}: {receipt.reasons}"
        tell(text, f"{text}; {to_improve(config, name, own)}")


def tell_of_length(config: TranslatorConfig, num_tokens: int, name: str | None = None) -> None:
    """Warn of a prompt longer than the longest prefix on which a translator was fitted or tested.

    There is no warning if the translator does not record that.
    """
    longest, it = config.longest_prefix, called(config, name)
    if longest is not None and num_tokens - 1 > longest:
        tell(
            f"{it}, {longest}",
            f"the prompt has {num_tokens} tokens, and {it} was fitted and tested on prefixes of at "
            f"most {longest}: beyond them its quality is unknown; fit it on longer conversations, "
            f"or let {config.target.name} read such prompts itself",
        )


def command(*words: str) -> str:
    """A command of this package, quoted for a shell."""
    return f"`{shlex.join(['kvlingo-mlx', *words])}`"


def called(config: TranslatorConfig, name: str | None) -> str:
    """A translator in a message, told apart from others of its pair."""
    if name is None:
        return config.title
    return f"the translator {name} (from {config.source.name} to {config.target.name})"


def to_get(source: str, target: str) -> str:
    """Where a pair has no translator."""
    got = command("import", "PATH_OR_HUB_ID")
    return f"make one with {command('pair', source, target)}, or get one with {got}"


def to_measure(config: TranslatorConfig, name: str | None) -> str:
    """A command that measures a translator with both models."""
    ends = "--source", config.source.name, "--target", config.target.name
    return command("verify", name or "TRANSLATOR", *ends)


def to_tune(config: TranslatorConfig, name: str | None) -> str | None:
    """A command that chooses native layers; None between two tokenizers, where there are none."""
    if config.alignment is not None:
        return None
    named = () if name is None else ("--translator", name)
    ends = config.source.name, config.target.name
    return command("tune", *ends, *named, "--min-recall", "0.9")


def to_improve(config: TranslatorConfig, name: str | None, own: bool) -> str:
    """Where a translator works badly; ``own`` says whether `tune` may write to its folder."""
    ends = config.source.name, config.target.name
    better = (
        f"{command('pair', *ends, '--force')} with more --minutes, and --data of yours, makes a "
        "better one"
    )
    tune = to_tune(config, name) if own else None
    return better if tune is None else f"{tune} lets the target read its first layers; {better}"
