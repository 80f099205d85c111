"""Translators, loaded; and which of the local store is the one of a pair."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from kvlingo_mlx.arguments import checked
from kvlingo_mlx.embedded import TRANSLATORS
from kvlingo_mlx.errors import (
    KVLingoError,
    MalformedTranslatorError,
    MissingTranslatorError,
)
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.maps import flops_of
from kvlingo_mlx.format.tensor_file import MAX_FILE_BYTES
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.format.translator_folder import CONFIG_FILE, OUR_FILES, WEIGHTS_FILE
from kvlingo_mlx.loading.grading import receipt_of
from kvlingo_mlx.loading.hub import resolve
from kvlingo_mlx.loading.notes import tell, tell_of_grade
from kvlingo_mlx.loading.pairing import check_pair, matches
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator
from kvlingo_mlx.translators.quantised import check_bits


@checked
def load_translator(
    path_or_hf_repo: str | os.PathLike[str], *, quantize: int | None = None
) -> Translator:
    """Load a translator folder, strictly; from disk or the Hub.

    Args:
        path_or_hf_repo: A folder or a Hub id.
        quantize: Keep its matrices in 8 or 4 bits, as mlx-lm quantises a model: affine, groups
            of 64 along each stored row. Those whose rows are no multiple of 64 long keep their
            floats, as do biases and gates. Such a translator cannot be saved. What it costs
            ``kvlingo-mlx eval --quantize 8,4`` tells: the embedded ones stand 8 bits, not 4.

    Raises:
        ValueError: ``quantize`` is something else, or would change no matrix.
        MissingTranslatorError: No such folder or repository.
        MalformedTranslatorError: The folder breaks the format.
    """
    check_bits(quantize)
    path = _translator_folder(path_or_hf_repo)
    config, weights = translator_folder.read(path)
    translator_folder.check_sizes(path, config, weights)
    found = replace(build(config, weights, quantize=quantize), path=path)
    _ = found.digest  # worked out now, not while a user waits for a first token
    return found


def translator_bytes(
    translator: Translator | str | os.PathLike[str] | None,
    source: LanguageModel,
    target: LanguageModel,
) -> int:
    """Bytes of a translator's file that is yet to be read; 0 where it is not at hand."""
    if isinstance(translator, Translator):
        return 0
    try:
        found = find_translator(source, target) if translator is None else translator
        size = (_translator_folder(found) / WEIGHTS_FILE).stat().st_size
    except (KVLingoError, OSError):  # told when it is loaded
        return 0
    return size if size <= MAX_FILE_BYTES else 0  # or it will not be read


def _translator_folder(path_or_hf_repo: str | os.PathLike[str]) -> Path:
    name = os.fspath(path_or_hf_repo)
    return resolve(name, None, list(OUR_FILES), MissingTranslatorError)[0]


def home() -> Path:
    """Where we keep what is the user's: ``KVLINGO_HOME``, else a folder in the user's cache.

    Raises:
        ValueError: There is neither.
    """
    given = os.environ.get("KVLINGO_HOME")
    try:
        return Path(given) if given else Path.home() / ".cache" / "kvlingo-mlx"
    except RuntimeError:  # no HOME, and a user whom the system does not know
        raise ValueError(
            "this user has no home folder to keep translators in; set KVLINGO_HOME to a folder"
        ) from None


def store() -> Path:
    """The local translator store."""
    return home() / "translators"


def stored_translators() -> Iterator[Path]:
    """Translator folders at hand: the user's store first, newest first, then the package's.

    A folder whose name starts with a dot is one that was never finished.
    """
    for root in (store(), TRANSLATORS):
        files = [p for p in root.glob(f"[!.]*/{CONFIG_FILE}") if (p.parent / WEIGHTS_FILE).exists()]
        yield from (p.parent for p in sorted(files, key=lambda p: -p.stat().st_mtime_ns))


def find_translator(
    source: LanguageModel,
    target: LanguageModel,
    *,
    allow_mismatch: bool = False,
    suits: Callable[[TranslatorConfig], bool] = lambda config: True,
) -> Path:
    """The stored translator of a pair, one that this version can apply.

    One that ``suits`` goes before all others, then one that was made for these very models, then
    that of the best receipt, then the newest.

    Raises:
        MissingTranslatorError: There is none; says how to make one.

    Warns:
        KVLingoWarning: There are several, and receipts do not tell which is best.
    """
    one = source.tokenizer_fingerprint == target.tokenizer_fingerprint
    others: list[tuple[Path, TranslatorConfig]] = []
    for tolerance in (False, True) if allow_mismatch else (False,):  # their own first
        found: list[tuple[Path, TranslatorConfig]] = []
        for path in stored_translators():
            try:
                config = translator_folder.read_config(path)
            except MalformedTranslatorError:
                continue  # a folder of no use to this pair must not block all others
            ends = ((config.source, source), (config.target, target))
            if (config.alignment is None) == one and all(
                matches(spec, model, allow_mismatch=tolerance) for spec, model in ends
            ):
                found.append((path, config))
        if suiting := [pair for pair in found if suits(pair[1])]:
            return _best(suiting)
        others = others or found
    if others:
        return _best(others)
    raise MissingTranslatorError(
        f"no translator from {source.name} to {target.name} is in the local store; make one "
        f"with `kvlingo-mlx fit --source {source.name} --target {target.name} --data FILE.jsonl "
        "--out DIR`, or get one with `kvlingo-mlx import PATH_OR_HUB_ID`"
    )


def _best(found: Sequence[tuple[Path, TranslatorConfig]]) -> Path:
    """Of several translators of one pair, newest first, the one of the best receipt.

    The receipts are of the same conversations read by the same target, so the lower KL is the
    better one; those of other conversations count as none, and none is worse than any.
    """

    def kl(config: TranslatorConfig) -> float:
        receipt = receipt_of(config)
        return math.inf if receipt is None else receipt.kl

    path, config = min(found, key=lambda pair: kl(pair[1]))  # the newest of equals
    others = [pair for pair in found if pair[0] != path]
    equal = [other for other, theirs in others if kl(theirs) == kl(config)]
    silent = [other for other, theirs in others if math.isinf(kl(theirs))]
    ends = f"of {len(found)} stored translators from {config.source.name} to {config.target.name}"
    if equal and math.isinf(kl(config)):
        told = f"{ends} none has a receipt that tells how good it is: the newest, {path}, is used"
    elif equal:
        told = f"{ends} the best have equal receipts: the newest, {path}, is used"
    elif silent:
        told = f"{ends} {path} is used; {silent[0]} has no receipt to be compared by"
    else:
        return path
    tell(told, f"{told}; `kvlingo-mlx verify` measures one, `kvlingo-mlx list` shows all")
    return path


def resolve_translator(
    translator: Translator | str | os.PathLike[str] | None,
    source: LanguageModel,
    target: LanguageModel,
    *,
    allow_mismatch: bool = False,
    quantize: int | None = None,
) -> Translator:
    """The translator to use: a loaded one, one by path or id, or the stored one of the pair.

    ``quantize`` is for one that is loaded here, as in :func:`load_translator`.

    Raises:
        IncompatibleTranslatorError: It is for another pair.
        MissingTranslatorError: None was given and none is stored.
    """
    if translator is None:
        translator = find_translator(source, target, allow_mismatch=allow_mismatch)
    if not isinstance(translator, Translator):
        translator = load_translator(translator, quantize=quantize)
    check_pair(translator.config, source, target, allow_mismatch=allow_mismatch)
    tell_of_grade(translator.config)
    return translator


@dataclass(frozen=True)
class TranslatorFacts:
    """What is known of a translator whose weights are unread, by :class:`Translator`'s names."""

    config: TranslatorConfig
    dtype: str
    flops_per_token: int
    bits: int | None = None


def translator_facts(
    translator: Translator | str | os.PathLike[str] | None,
    source: LanguageModel,
    target: LanguageModel,
    *,
    allow_mismatch: bool = False,
) -> Translator | TranslatorFacts:
    """What :func:`resolve_translator` would find: as it is, or its facts, its weights unread.

    Raises:
        MissingTranslatorError: None was given and none is stored.
        MalformedTranslatorError: The folder breaks the format.
    """
    if isinstance(translator, Translator):
        return translator
    if translator is None:
        translator = find_translator(source, target, allow_mismatch=allow_mismatch)
    config, dtype, shapes = translator_folder.read_facts(_translator_folder(translator))
    return TranslatorFacts(config, dtype, flops_of((n, prod(s)) for n, s in shapes.items()))
