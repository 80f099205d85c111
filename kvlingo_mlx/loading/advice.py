"""What to type next: the commands that messages advise, each only where the pair allows it.

``name`` is what a command takes for the translator (``loading.translators.name_of``).
"""

from __future__ import annotations

import shlex

from kvlingo_mlx.format.translator_config import TranslatorConfig


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
