"""Records that a training leaves out: those not English, and those of an evaluation.

The paper's translators are fitted on the English subset of their data (appendix "Cache translation
across languages"), and their data share nothing with the benchmarks (appendix "Training data").
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvlingo_mlx.tokenization.records import Source, Spec, open_source

FIELDS = ("language", "lang", "language_code", "locale")
PLACES = ("metadata", "meta", "extra_info")  # objects in which these fields may stand, too
ENGLISH = frozenset(("english", "en", "eng"))
READ = 4096  # characters read of each text
LATIN = 0.9  # the least share of letters of the alphabet a to z
WORDS = 8  # fewer words are judged by their letters alone
# Frequent words of languages in Latin letters; one that is English, too, counts as English alone.
COMMON = {
    "en": "the of and to in is you that it for on are with as be this have from or not your can "
    "was will would what how when which they she my his her but",
    "es": "de la que el en y los se del las un por con una para no es su al lo como más pero",
    "fr": "de la le et les des en un une du que est pour dans qui sur pas au il avec ce vous je",
    "de": "der die und das in den von zu mit sich des auf für ist im dem nicht ein eine als ich",
    "it": "di che e la il un per in una non sono del con le si da gli come dei alla nel più",
    "pt": "de que e o a do da em um para com não uma os no se na por mais as dos como ao você",
    "nl": "de het een en van in is dat op te zijn met voor niet aan er om ook als dan maar ik",
    "sv": "och att det som en på är av för med den till inte om ett har jag var de så men",
    "da": "og at det er en til på som i de med for ikke der den af har jeg et om vi var",
    "fi": "ja on ei se että en oli hän mutta kun ovat myös sen niin joka tai ole jos minä",
    "pl": "na się nie że jest jak co ale po tak od za przez dla są czy które który która oraz",
    "cs": "se na je že jsem ale jako za si po tak pro jsou není která který které nebo při jeho",
    "hu": "a az és hogy nem is egy ez de ha meg csak már volt mint van el vagy kell",
    "ro": "de și în la a cu pe nu că este din un o pentru care mai se sunt ce o să",
    "tr": "ve bir bu da de için ne ile ben çok daha gibi var mi ama o olarak sonra değil",
    "id": "yang dan di itu dengan untuk dari ini dalam tidak akan pada saya ke ada anda juga",
    "vi": "và của là có không được cho một trong các này với người những để tôi khi đã bạn",
}
OURS = frozenset(COMMON["en"].split())
SHARED = OURS | frozenset("an at by do so no me he we if all".split())  # they tell nothing apart
# A single letter is a name in code and tables.
OTHERS = [
    frozenset(word for word in COMMON[name].split() if len(word) > 1) - SHARED
    for name in COMMON
    if name != "en"
]
SURE = 2  # frequent words by which another language is known
WORD = re.compile(r"\b[^\W\d_]+(?:'[^\W\d_]+)?\b")


def is_english(record: Mapping[str, Any], texts: Sequence[str]) -> bool:
    """Whether a record is English: as it says in a field, else by each of its texts.

    Args:
        record: The record as it was read. ``language``, ``lang``, ``language_code`` or ``locale``
            counts, there or in its ``metadata``: a name or a code such as ``en-US``.
        texts: Its messages' contents, or its text.
    """
    stated = _stated(record)
    return all(map(reads_english, texts)) if stated is None else stated


def _stated(record: Mapping[str, Any]) -> bool | None:
    """Whether a record calls itself English; None if it does not say."""
    places = [record, *(record.get(name) for name in PLACES)]
    values = [p.get(name) for p in places if isinstance(p, Mapping) for name in FIELDS]
    named = (value.strip().lower() for value in values if isinstance(value, str) and value.strip())
    first = next(named, None)
    return None if first is None else re.split(r"[-_ (,]", first)[0] in ENGLISH


def reads_english(text: str) -> bool:
    """Whether a text's beginning may be English.

    At least nine of ten letters are of the alphabet a to z, and no other language of
    :data:`COMMON` has two or more of its frequent words in it and more than English has. A text of
    few words, of names or of code passes by its letters alone; so do languages in Latin letters
    that the table lacks.
    """
    words = WORD.findall(text[:READ].lower())
    letters = "".join(words)
    if sum(letter < "\x80" for letter in letters) < LATIN * len(letters):
        return False
    if len(words) < WORDS:
        return True
    most = max(sum(word in known for word in words) for known in OTHERS)
    return most < SURE or most <= sum(word in OURS for word in words)


LONG = 32  # characters from which a text identifies what it is in; shorter ones are greetings


def fingerprint(text: str) -> bytes:
    """A hash of a text, whatever its capitals and blanks."""
    return hashlib.blake2b(_plain(text).encode(), digest_size=16).digest()


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _texts(value: Any) -> Iterator[str]:
    """All texts in a record of any schema."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _texts(part)


@dataclass(frozen=True)
class RecordFilter:
    """Which records of a training are left out; counts them."""

    english: bool = False  # all that are not English
    # Those that ask what these sources of an evaluation's data hold, of any schema: one of their
    # questions, or their text, is a text there of 32 characters or more.
    apart_from: tuple[Spec, ...] = ()
    left_out: Counter[str] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        return self.english or bool(self.apart_from)

    def __str__(self) -> str:
        reasons = ["not English"] * self.english + ["evaluated on"] * bool(self.apart_from)
        return ", ".join(f"{self.left_out[why]:,} records {why}" for why in reasons)

    def accepts(self, record: Any, found: Mapping[str, Any]) -> bool:
        """Whether a record is read; ``found`` is what ``conversations.normalise`` makes of it."""
        refusal = self._refusal(record, found) if self else ""
        self.left_out.update([refusal] if refusal else [])
        return not refusal

    def _refusal(self, record: Any, found: Mapping[str, Any]) -> str:
        messages = found.get("messages", [{"role": "user", "content": found.get("text")}])
        if self.english and not is_english(record, [m["content"] for m in messages]):
            return "not English"
        questions = (fingerprint(m["content"]) for m in messages if m["role"] == "user")
        if self.apart_from and not self._known.isdisjoint(questions):
            return "evaluated on"
        return ""

    @property
    def settings(self) -> dict[str, Any]:
        """What a resumed training must keep; the evaluation's data by name, with their hash."""
        known = {source.name: source.digest for source in self._sources}
        return {"english": self.english, "apart_from": known}

    @cached_property
    def _sources(self) -> tuple[Source, ...]:
        return tuple(open_source(spec)[0] for spec in self.apart_from)

    @cached_property
    def _known(self) -> frozenset[bytes]:
        records = (source.read(i)[0] for source in self._sources for i in range(len(source.sizes)))
        texts = (text for record in records for text in _texts(record))
        return frozenset(fingerprint(text) for text in texts if len(_plain(text)) >= LONG)
