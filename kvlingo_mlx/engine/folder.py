"""A conversation on disk: one folder, replaced atomically, refused when anything in it differs.

``conversation.json`` holds everything except the arrays, and its own digest. It names the file with
the arrays, and its sha256. A save writes a new file, then replaces ``conversation.json``, then
removes the file that it no longer names. Whatever interrupts a save, the folder holds the old
conversation or the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

from mlx.utils import tree_flatten

from kvlingo_mlx.caches.validation import validate_cache
from kvlingo_mlx.engine.exchange import Exchange
from kvlingo_mlx.engine.storage import Held, from_numpy, read_file, to_numpy, write_file
from kvlingo_mlx.engine.transcript import Transcript
from kvlingo_mlx.errors import (
    IncompatibleTranslatorError,
    KVLingoError,
    MalformedConversationError,
    printable,
)
from kvlingo_mlx.format.atomic import sync_file
from kvlingo_mlx.machines import OWN_FOLDER, digest_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.threads import unit
from kvlingo_mlx.version import __version__

FORMAT, VERSION = "kvlingo-conversation", 6  # 5: a line is one file; 6: so are all lines
FACTS = "conversation.json"
OURS = re.compile(r"line(s|-\d+)\.[0-9a-f]{16}\.safetensors")  # those of version 5, too
ARRAY = "array"  # what stands for an array in JSON: its name in the file
SAMPLED = 64  # about how many numbers of an array go into the digest


@unit
def describe(model: LanguageModel) -> dict[str, Any]:
    """The facts that must be equal for a cache to fit ``model``: weights, their bits, dtype.

    The digest of the weights covers all norms, the key and value projections of two layers, and
    some numbers of every array. A further training of the model changes these.
    """
    if model.described:
        return model.described
    digest = hashlib.sha256()
    for attention in (model.attentions[0], model.attentions[-1]):
        for module in model.family.taps(attention):
            for _, array in sorted(dict(tree_flatten(module.parameters())).items()):
                digest.update(_bytes(array))
    for name, array in sorted(dict(tree_flatten(model.model.parameters())).items()):
        some = mx.flatten(array)[:: max(1, array.size // SAMPLED)]
        digest.update(f"{name} {array.shape} {array.dtype}".encode() + _bytes(some))
    found = {
        "name": model.name,
        "weights": digest.hexdigest(),
        "fingerprint": dict(model.spec().fingerprint),
        "quantization": model.config.get("quantization"),
        "cache_dtype": str(model.cache_dtype).rsplit(".", 1)[-1],
    }
    if model.described is not None:
        model.described.update(found)
    return found


def _bytes(array: mx.array) -> bytes:
    return to_numpy({"": array})[""].tobytes()


# ---- writing ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """A conversation as it was at one moment, ready to be written."""

    # what becomes ``conversation.json``, as text, since the conversation changes its lists as it
    # goes on
    facts: str
    arrays: Held  # by the names that stand for them there

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write it to a folder, in place of an older conversation there.

        Any thread may do that while the conversation goes on; it touches no MLX array.

        Raises:
            ValueError: ``folder`` exists and is not a saved conversation.
        """
        folder = Path(folder)
        check_destination(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"lines.{os.urandom(8).hex()}.safetensors"
        try:
            facts = json.loads(self.facts)
            facts |= {"file": path.name, "sha256": write_file(path, self.arrays)}
            sealed = {**facts, "digest": digest_of(facts)}
            replace_text(folder / FACTS, json.dumps(sealed) + "\n")
        except BaseException:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()  # fails unless it is empty, so unless it was made here
            raise
        for other in folder.iterdir():
            if OURS.fullmatch(other.name) and other != path:
                other.unlink()
        return folder


@unit
def draft(exchange: Exchange, transcript: Transcript) -> Draft:
    """A conversation as it is now; its arrays are shared, not copied."""
    arrays: dict[str, mx.array] = {}

    def named(value: Any) -> dict[str, str]:
        if not isinstance(value, mx.array):
            raise TypeError(f"{type(value).__name__} cannot be saved")
        arrays[name := f"{len(arrays)}"] = value
        return {ARRAY: name}

    # Copies, since a cache changes its own arrays in place.
    lines = {name: line.copy() for name, line in exchange.lines.items()}
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "software": f"kvlingo-mlx {__version__}",
        "strategy": exchange.rules.switching,
        "active": exchange.active,
        "models": {
            name: describe(line.model) if len(line) else {"name": line.model.name}
            for name, line in lines.items()
        },
        "translators": [
            {"source": source, "target": target, "sha256": translator.digest}
            for (source, target), translator in sorted(exchange.directions.loaded.items())
        ],
        "transcript": transcript.to_json(),
        # as text, in which the arrays are found again
        "lines": json.dumps({name: line.facts() for name, line in lines.items()}, default=named),
    }
    mx.eval(list(arrays.values()))
    return Draft(json.dumps(facts), to_numpy(arrays))


def check_destination(folder: Path) -> None:
    """Raise ValueError if a folder exists and is not a saved conversation."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder to save the conversation in")
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    names = [name for name in names if not name.startswith(".")]  # files of a file manager
    ours = re.compile(f"{OURS.pattern}|{OWN_FOLDER.pattern}|{FACTS}([.]tmp)?")
    if not all(map(ours.fullmatch, names)):
        raise ValueError(
            f"{folder} exists and is not a saved conversation; choose another name, or remove it"
        )


def replace_text(path: Path, text: str) -> None:
    """Write a file that its owner alone may read, which takes the place of an older one at once."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            sync_file(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ---- reading ----------------------------------------------------------------------------


class Saved:
    """A folder that :func:`write` made.

    Raises:
        MalformedConversationError: The folder is not a saved conversation, or of another version.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            self._facts = json.loads((self.folder / FACTS).read_text(encoding="utf-8"))
        except OSError:
            raise MalformedConversationError(
                f"{self.folder} is no saved conversation: it has no readable {FACTS}"
            ) from None
        except ValueError as error:
            raise self._damaged(FACTS, str(error)) from None
        if not isinstance(self._facts, dict) or self._facts.get("format") != FORMAT:
            raise self._damaged(FACTS, f"it is no {FORMAT}")
        if self._facts.get("version") != VERSION:
            raise MalformedConversationError(
                f"{self.folder} is of format version {self._facts.get('version')!r}; this version "
                f"reads {VERSION}: resume it with {self._facts.get('software', 'another version')}"
            )
        if self._facts.pop("digest", None) != digest_of(self._facts):
            raise self._damaged(FACTS, "its digest is another one than when it was saved")

    def _damaged(self, file: str, text: str) -> MalformedConversationError:
        return MalformedConversationError(printable(f"{self.folder / file}: {text:.300}"))

    @contextlib.contextmanager
    def _believed(self) -> Iterator[None]:
        """Turn the errors of a damaged ``conversation.json`` into MalformedConversationError."""
        try:
            yield
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise self._damaged(FACTS, f"{type(error).__name__}: {error}") from None
        except ValueError as error:
            raise self._damaged(FACTS, str(error)) from None

    @property
    def switching(self) -> str:
        """How the conversation's models took over from each other."""
        with self._believed():
            return str(self._facts["strategy"])

    def check_models(self, models: Mapping[str, LanguageModel]) -> None:
        """Refuse models that are not the conversation's; further models may join.

        Raises:
            ValueError: A model is missing, or is another than before.
        """
        with self._believed():
            wanted = {name: (facts["name"], facts) for name, facts in self._facts["models"].items()}
        for name, (origin, facts) in wanted.items():
            if name not in models:
                raise ValueError(
                    f"the conversation in {self.folder} needs a model {name!r} (it was {origin}); "
                    f"there are {', '.join(models) or 'none'}"
                )
            if "weights" not in facts:  # it has read nothing yet
                continue
            found = describe(models[name])
            for field in ("fingerprint", "quantization", "cache_dtype", "weights"):
                if found[field] != facts.get(field):
                    raise ValueError(
                        f"the conversation in {self.folder} was held with another model {name!r} "
                        f"({origin}): {field} differs from that of {models[name].name}; give that "
                        "model, or begin a new conversation"
                    )

    @unit
    def restore(self, exchange: Exchange) -> Transcript:
        """Fill the lines of an exchange of the right models; return the transcript.

        Raises:
            MalformedConversationError: A file is missing or damaged.
            IncompatibleTranslatorError: A translator is missing, or is another than before. With
                ``on_missing="reprefill"`` it may be missing: what it brought is in the caches.
        """
        with self._believed():
            for entry in self._facts["translators"]:
                self._check_translator(exchange, **entry)
            arrays = self._arrays(self._facts["file"], self._facts["sha256"])

            def array(found: dict[str, Any]) -> Any:
                return arrays[found[ARRAY]] if set(found) == {ARRAY} else found

            lines = json.loads(self._facts["lines"], object_hook=array)
            for name, facts in lines.items():
                line = exchange.lines[name]
                line.restore(facts)
                validate_cache(line.cache, line.model, len(line))
            exchange.active = self._facts["active"]
            tokens = {name: line.tokens for name, line in exchange.lines.items()}
            what = f"conversation in {self.folder.parent}"
            exchange.group.agree(lambda: {what: digest_of([tokens, self._facts["transcript"]])})
            return Transcript.from_json(self._facts["transcript"], exchange.models)

    def _check_translator(self, exchange: Exchange, source: str, target: str, sha256: str) -> None:
        found = exchange.directions.translator(source, target)
        if found is None and exchange.rules.on_missing == "reprefill":
            return
        if found is None or found.digest != sha256:
            what = "none is given or stored" if found is None else f"{found.name} has other weights"
            raise IncompatibleTranslatorError(
                f"the conversation in {self.folder} needs the translator from {source} to {target} "
                f"that it was held with (sha256 {sha256:.12}, the digest that `kvlingo-mlx show` "
                f"prints), and {what}; give that one with translators=['FOLDER'] (--translator "
                "FOLDER)"
                + (
                    ""
                    if found
                    else ", or go on without it: on_missing='reprefill' (-c on_missing=reprefill)"
                )
            )

    def _arrays(self, file: str, sha256: str) -> dict[str, mx.array]:
        if not OURS.fullmatch(file):
            raise self._damaged(FACTS, f"it names a file {file!r}")
        try:
            arrays = from_numpy(read_file(self.folder / file, sha256))
        except KVLingoError as error:
            raise MalformedConversationError(str(error)) from None
        mx.eval(arrays)  # now any thread may use them
        return arrays
