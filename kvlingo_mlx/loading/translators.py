"""Load translators, and find the translator of a pair in the local store."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kvlingo_mlx.arguments import checked
from kvlingo_mlx.embedded import TRANSLATORS, zoo_names
from kvlingo_mlx.errors import (
    KVLingoError,
    MalformedTranslatorError,
    MissingTranslatorError,
    UnsupportedModelError,
)
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.tensor_file import MAX_FILE_BYTES
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.format.translator_folder import CONFIG_FILE, OUR_FILES, WEIGHTS_FILE
from kvlingo_mlx.loading.grading import GRADES, receipt_of
from kvlingo_mlx.loading.hub import resolve
from kvlingo_mlx.loading.notes import command, tell, tell_of_grade, to_get, to_measure
from kvlingo_mlx.loading.pairing import check_pair, matches
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.aligned_prefix import check_layers
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator

AnyTranslator = Translator | str | os.PathLike[str]
Suits = Callable[[TranslatorConfig], bool]


@checked
def load_translator(
    path_or_hf_repo: str | os.PathLike[str], *, quantize: int | None = None
) -> Translator:
    """Load a translator folder from disk or the Hub, with every check of the format.

    Args:
        path_or_hf_repo: A folder, a name that `kvlingo-mlx list` shows, or a Hub id.
        quantize: Hold its matrices in 8 or 4 bits, quantised as mlx-lm quantises a model: affine,
            in groups of 64 along each stored row. Matrices whose row length is no multiple of 64
            stay floats, as do biases and gates. A quantised translator cannot be saved.
            ``kvlingo-mlx eval --quantize 8,4`` measures the cost: the embedded translators work
            well in 8 bits, but not in 4.

    Raises:
        ValueError: ``quantize`` is neither 8, 4 nor None, or it would change no matrix.
        MissingTranslatorError: There is no such folder or repository.
        MalformedTranslatorError: The folder breaks the format.
    """
    path = folder_of(path_or_hf_repo)
    config, weights = translator_folder.read(path)
    translator_folder.check_sizes(path, config, weights)
    found = replace(build(config, weights, quantize=quantize), path=path)
    _ = found.digest  # computed now, not while a user waits for a first token
    return found


def resolve_translator(
    translator: AnyTranslator | None,
    source: LanguageModel,
    target: LanguageModel,
    *,
    allow_mismatch: bool = False,
    quantize: int | None = None,
) -> Translator:
    """The translator to use: a loaded one, one by path or Hub id, or the pair's stored one.

    ``quantize`` applies only to a translator that is loaded here, as in :func:`load_translator`.

    Raises:
        IncompatibleTranslatorError: It is for another pair.
        MissingTranslatorError: None was given and none is stored.
    """
    if translator is None:
        translator = find_translator(source, target, allow_mismatch=allow_mismatch)
    if not isinstance(translator, Translator):
        translator = load_translator(translator, quantize=quantize)
    check_pair(translator.config, source, target, allow_mismatch=allow_mismatch)
    tell_of_grade(translator.config, *known_by(translator.path))
    return translator


def translator_bytes(
    translator: AnyTranslator | None, source: LanguageModel, target: LanguageModel
) -> int:
    """The bytes of a translator that is not loaded yet; 0 if it cannot be found here."""
    if isinstance(translator, Translator):
        return 0
    try:
        found = find_translator(source, target) if translator is None else translator
        size = (folder_of(found) / WEIGHTS_FILE).stat().st_size
    except (KVLingoError, OSError):  # reported when it is loaded
        return 0
    return 0 if size > MAX_FILE_BYTES else size  # refused when it is loaded


def home() -> Path:
    """The folder of the user's data: ``KVLINGO_HOME``, else one in the user's cache folder.

    Raises:
        ValueError: ``KVLINGO_HOME`` is not set and the user has no home folder.
    """
    given = os.environ.get("KVLINGO_HOME")
    try:
        return Path(given) if given else Path.home() / ".cache" / "kvlingo-mlx"
    except RuntimeError:  # HOME is not set, and the system does not know the user
        raise ValueError(
            "this user has no home folder to keep translators in; set KVLINGO_HOME to a folder"
        ) from None


def store() -> Path:
    """The folder of the local translator store."""
    return home() / "translators"


def stored_translators() -> Iterator[Path]:
    """All stored translator folders: the user's store, newest first, then the package's.

    A folder whose name starts with a dot was never finished and is left out.
    """
    for root in (store(), TRANSLATORS):
        files = [p for p in root.glob(f"[!.]*/{CONFIG_FILE}") if (p.parent / WEIGHTS_FILE).exists()]
        yield from (p.parent for p in sorted(files, key=lambda p: -p.stat().st_mtime_ns))


def folder_of(path_or_hf_repo: str | os.PathLike[str]) -> Path:
    """The folder of a translator that is named by its path, its name in the store, or a Hub id."""
    name = by_name(os.fspath(path_or_hf_repo))
    return resolve(name, None, list(OUR_FILES), MissingTranslatorError)[0]


def by_name(name: str) -> str:
    """The path of the translator that `list` shows by this name; any other name as it is."""
    if Path(name).name == name and not os.path.exists(name) and name not in zoo_names():
        for root in (store(), TRANSLATORS):
            if os.path.isfile(root / name / CONFIG_FILE):
                return str(root / name)
    return name


def name_of(path: Path | None) -> str | None:
    """What commands call a translator's folder: its name where `list` shows it, else its path."""
    if path is None:
        return None
    return path.name if by_name(path.name) == str(path) else str(path)


def known_by(path: Path | None) -> tuple[str | None, bool]:
    """A folder's name in commands, and whether it is one of the user's that `tune` may write to."""
    own = path is not None and path.parent != TRANSLATORS and os.access(path, os.W_OK)
    return name_of(path), own


@checked
def find_translator(
    source: LanguageModel,
    target: LanguageModel,
    *,
    allow_mismatch: bool = False,
    suits: Suits = lambda config: True,
) -> Path:
    """The stored translator of a pair that this version can apply.

    Candidates are ranked: first those that ``suits`` accepts, then those made for exactly these
    models, then by the best receipt, then the newest.

    Raises:
        MissingTranslatorError: There is none; the message says how to make one.

    Warns:
        KVLingoWarning: There are several, and receipts do not show which is best.
    """
    one = source.tokenizer_fingerprint == target.tokenizer_fingerprint
    found: dict[tuple[bool, bool], list[tuple[Path, TranslatorConfig]]] = {}  # by what is lacking
    for path in stored_translators():
        try:
            config = translator_folder.read_config(path)
        except MalformedTranslatorError:
            continue  # one unreadable folder must not hide all others
        if (config.alignment is None) != one:
            continue
        ends = ((config.source, source), (config.target, target))
        exact = all(matches(spec, model) for spec, model in ends)
        if exact or (allow_mismatch and all(matches(*end, allow_mismatch=True) for end in ends)):
            found.setdefault((not suits(config), not exact), []).append((path, config))
    if found:
        return _best(found[min(found)])
    advice = to_get(source.name, target.name)
    if not one:
        try:
            check_layers(target.geometry.layers, target.name)
        except UnsupportedModelError as error:  # by which ``fit`` would refuse the pair
            advice = f"none can be made: {error}"
    raise MissingTranslatorError(
        f"no translator from {source.name} to {target.name} is in the local store; {advice}"
    )


def _best(found: Sequence[tuple[Path, TranslatorConfig]]) -> Path:
    """The translator with the best receipt among several of one pair, given newest first.

    The receipts are of the same conversations read by the same target, so of one grade the lower
    KL is the better one. A receipt of other conversations counts as none, worse than any.
    """
    unknown = (True, math.inf)

    def worth(config: TranslatorConfig) -> tuple[bool, float]:
        receipt = receipt_of(config)
        return unknown if receipt is None else (receipt.grade == GRADES[-1], receipt.kl)

    path, config = min(found, key=lambda pair: worth(pair[1]))  # of equal ones, the newest
    rivals = [p for p, c in found if p != path and worth(c) in (worth(config), unknown)]
    if rivals:
        text = (
            f"of {len(found)} stored translators from {config.source.name} to {config.target.name} "
            f"{path} is used; no receipt shows that it is better than {rivals[0]}"
        )
        measure = to_measure(config, name_of(rivals[0]))
        tell(text, f"{text}; {measure} measures that, {command('list')} shows all")
    return path
