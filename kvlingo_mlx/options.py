"""Options in groups, each declared once and read alike by the command line, Python and the server.

A field says its default, what it does, which values it takes and how it is typed; a group's
``NEEDS`` say which options have no effect without which others. A group checks itself when it is
made. Errors name options as Python does; the command line spells the same error by its flags. No
MLX is loaded here, so the package's own classes are known by their names.
"""

import json
import math
import operator
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

Spell = Callable[[str, Any], str]  # (name, value) -> the option as a user types it
ADDRESS = " at 0x"  # in what Python shows of an object that has no text of its own


class OptionError(ValueError):
    """A wrong option, or one without effect; ``write`` words it in another spelling."""

    def __init__(self, write: Callable[[Spell], str]) -> None:
        super().__init__(write(as_argument))
        self.write = write


def as_argument(name: str, value: Any) -> str:
    """An option as it is typed in Python; for the value None, the bare name."""
    plain = value is None or callable(value) or ADDRESS in repr(value)
    return name if plain else f"{name}={shown(value)}"


def shown(value: object) -> str:
    """A value as a user would type it; of objects without such a form the type."""
    text = " ".join(repr(value).split())
    return f"of type {type(value).__name__}" if ADDRESS in text else f"{text:.60}"


# ---- which values an option takes --------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A test of an option's value, and the words that say what is accepted.

    ``read`` makes a value of the text that is typed, or raises ValueError: such a text stays as it
    is, and does not fit.
    """

    fits: Callable[[Any], bool]
    words: str
    read: Callable[[str], Any] | None = None

    def check(self, name: str, value: Any) -> None:
        """Refuse (OptionError) a value that does not fit."""
        if not self.fits(value):
            raise OptionError(
                lambda spell: f"{spell(name, None)} is {shown(value)}; give {self.words}"
            )


def is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


def is_whole(value: object) -> bool:
    """Whether a value is a whole number of Python's or NumPy's; True and False are not."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not hasattr(value, "shape") or value.shape == ()


def is_listed(value: object) -> bool:
    """Whether a value is an iterable such as a list or a generator, but no text and no dict."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def named(value: object, *names: str) -> bool:
    """Whether a value's class, or one of its base classes, has one of the given names."""
    return any(cls.__name__ in names for cls in type(value).__mro__)


def whole(words: str, least: float = -math.inf, most: float = math.inf) -> Kind:
    """Whole numbers from ``least`` to ``most``, which ``words`` describe."""
    return Kind(lambda value: is_whole(value) and least <= value <= most, words)


def number(words: str, fits: Callable[[float], bool] = lambda value: True) -> Kind:
    """Numbers that fit."""

    def fitting(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and fits(value)

    return Kind(fitting, words)


def one_of(*values: str) -> Kind:
    """One of these texts."""
    return Kind(lambda value: value in values, f"{', '.join(values[:-1])} or {values[-1]}")


def _stops(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, Sequence) and all(isinstance(t, str) and t for t in texts)


def text_of(read: Callable[[str], Any], words: str) -> Kind:
    """What a function makes of a text that is typed."""
    return Kind(lambda value: not isinstance(value, str), words, read)


def layers_of(text: str) -> int | str:
    """The value of ``native_layers`` as typed: a number, or ``auto``."""
    return int(text) if text.isdecimal() else text


STOP = Kind(_stops, "a text, or a list of texts, none of it empty")
NUMBER = whole("a whole number")
FROM_0 = number("a number, 0 or more", lambda value: 0 <= value < math.inf)
ABOVE_0 = number("a number above 0", lambda value: 0 < value < math.inf)
SECONDS = number("seconds above 0", lambda value: 0 < value < math.inf)
SHARE = number("a share from 0 to 1", lambda value: 0 <= value <= 1)
TOKENS = whole("a number of tokens, 0 or more", 0)
TEXT = Kind(lambda value: isinstance(value, str), "a text")
SWITCH = Kind(lambda value: type(value).__name__ in ("bool", "bool_"), "True or False")
COUNT = whole("1 or more", 1)
BITS = Kind(lambda value: type(value) is int and value in (8, 4),
            "8 or 4, or leave it out for float weights")  # fmt: skip
ANSWER = Kind(lambda value: is_whole(value) and (value > 0 or value == -1), "1 or more, or -1")
MODEL = Kind(
    lambda value: is_path(value) or named(value, "LanguageModel"),
    "a folder, a Hub id, or what kvlingo_mlx.load returns",
)
TRANSLATOR = Kind(
    lambda value: is_path(value) or named(value, "Translator"),
    "a folder, a Hub id, or what kvlingo_mlx.load_translator returns",
)
LAYERS = Kind(
    lambda value: is_whole(value) or (isinstance(value, str) and value == "auto"),
    "a number of layers, or 'auto'",
    layers_of,
)


# ---- which options need others -----------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """Options that have no effect unless another option, the partner, has a certain value."""

    options: str  # their names, separated by spaces
    partner: str  # its name; of several, separated by spaces, messages show the first
    works: Callable[..., bool]  # whether they have an effect, by the partners' values
    give: Any = None  # a value of the (first) partner by which they have; None: leave it out
    why: str = ""  # what the partner's present value means
    told: str = ""  # in place of the words about the partner and what to type

    def check(self, given: Iterable[str], values: Mapping[str, Any]) -> None:
        """Refuse (OptionError) options of ``given`` that would have no effect."""
        unused = [name for name in self.options.split() if name in given]
        if unused and not self.works(*(values.get(name) for name in self.partner.split())):
            raise OptionError(lambda spell: self._refusal(unused, values, spell))

    def _refusal(self, unused: Sequence[str], values: Mapping[str, Any], spell: Spell) -> str:
        names = ", ".join(spell(name, False if values[name] is False else None) for name in unused)
        verb, them = ("has", "it") if len(unused) == 1 else ("have", "them")
        said = f"{names} {verb} no effect "
        if self.told:
            return said + self.told
        partner = self.partner.split()[0]
        value, bare = values.get(partner), spell(partner, None)
        why = f", {self.why}" if self.why else ""
        if value is None or (value is False and spell(partner, False) == bare):
            add = spell(partner, self.give)
            return f"{said}without {bare}{why}; add {add}, or leave {them} out"
        said += f"with {spell(partner, value)}{why}; "
        if self.give is None or value is False:
            return f"{said}leave out one or the other"
        return f"{said}give {spell(partner, self.give)}, or leave {them} out"


def is_set(value: Any) -> bool:
    """Whether an option was given or a switch is on."""
    return value is not None and value is not False


def off(value: Any) -> bool:
    """Whether an option was left out or a switch is off."""
    return not is_set(value)


def among(*values: Any) -> Callable[[Any], bool]:
    """A test of whether a value is one of the given values."""
    return lambda value: value in values


def but(*values: Any) -> Callable[[Any], bool]:
    """A test of whether a value is none of the given values."""
    return lambda value: value not in values


def several(listed: Any) -> bool:
    """Whether a value is no collection of exactly one entry; empty ones are refused elsewhere."""
    return not hasattr(listed, "__len__") or len(listed) != 1


# ---- groups ------------------------------------------------------------------------------------


def option(
    default: Any,
    help: str,
    *flags: str,
    kind: Kind | None = None,
    word: bool = False,
    secret: bool = False,
) -> Any:
    """A group's field.

    Args:
        default: Its default; ``...`` makes it required.
        help: What it does; empty where the command line does not have it.
        flags: How it is typed there, if not by its name.
        kind: The values that it takes.
        word: Whether it is typed there as a word, without a flag.
        secret: Whether what shows the group leaves it out.
    """
    read = kind.read if kind else None
    facts = {"help": help, "flags": flags, "kind": kind, "read": read, "word": word}
    return field(default=MISSING if default is ... else default, metadata=facts, repr=not secret)


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Options that belong together. One that equals its default counts as left out.

    Raises:
        OptionError: A value is wrong, or an option has no effect.
    """

    NEEDS: ClassVar[tuple[Need, ...]] = ()

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        check(type(self), self.given(), values)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """The group's options among a function's, which has others beside them."""
        return cls(**{f.name: options[f.name] for f in fields(cls) if f.name in options})

    def given(self, *groups: type) -> dict[str, Any]:
        """The options that differ from their defaults; of ``groups``, or all."""
        listed = (field for group in groups or (type(self),) for field in fields(group))
        found = {field: getattr(self, field.name) for field in listed}
        return {f.name: v for f, v in found.items() if not same(v, read_as(f, f.default))}


def read_as(field: Field, typed: Any) -> Any:
    """The value of what is typed for a field, or of its default."""
    read = field.metadata.get("read")
    if read is None or not isinstance(typed, str):
        return typed
    try:
        return read(typed)
    except ValueError:
        return typed


def same(value: object, default: object) -> bool:
    """Whether a value is a default, which counts as left out."""
    return value is default or (type(value) is type(default) and bool(value == default))


def needs_of(group: type) -> tuple[Need, ...]:
    """What a group's options need, those of the groups that it extends included."""
    return tuple(need for cls in group.__mro__ for need in vars(cls).get("NEEDS", ()))


def kinds_of(group: type) -> dict[str, Kind]:
    """The values that a group's options take."""
    kinds = ((field.name, field.metadata.get("kind")) for field in fields(group))
    return {name: kind for name, kind in kinds if kind is not None}


def check(group: type, given: Mapping[str, Any], values: Mapping[str, Any] | None = None) -> None:
    """Refuse (OptionError) wrong or useless options of a group; ``values`` has defaults too."""
    kinds = kinds_of(group)
    for name in given.keys() & kinds.keys():
        kinds[name].check(name, given[name])
    if values is not None:
        for need in needs_of(group):
            need.check(given, values)


def _drawn(*off: float) -> Callable[..., bool]:
    """A test: tokens are sampled, or the option's value is one that switches the option off."""
    return lambda temperature, sampler, value: bool(temperature or sampler or value in off)


ALONE = "since a sampler chooses the tokens by itself"
GREEDY = "since the likeliest token is taken"


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(OptionGroup):
    """How an answer's tokens are chosen, and before which texts it ends."""

    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("temperature top_p top_k min_p", "sampler", off, why=ALONE),
        Need("top_p", "temperature sampler top_p", _drawn(1), 0.7, GREEDY),
        Need("top_k", "temperature sampler top_k", _drawn(0), 0.7, GREEDY),
        Need("min_p", "temperature sampler min_p", _drawn(0), 0.7, GREEDY),
        Need("seed", "temperature sampler seed", _drawn(), 0.7, GREEDY),
    )
    temperature: float = option(
        0.0, "Sampling temperature; 0 takes the likeliest token.", "--temp", kind=FROM_0
    )
    top_p: float = option(
        1.0, "Nucleus sampling.",
        kind=number("a number above 0, at most 1", lambda value: 0 < value <= 1),
    )  # fmt: skip
    top_k: int = option(
        0, "Sample from the best k; 0 is off.", kind=whole("a whole number, 0 or more", 0)
    )
    min_p: float = option(
        0.0, "Least probability relative to the best.",
        kind=number("a number from 0 to 1", lambda value: 0 <= value <= 1),
    )  # fmt: skip
    seed: int | None = option(
        None, "Seed of the sampler.",
        kind=whole("a whole number from 0 to 2^64 - 1", 0, 2**64 - 1),
    )  # fmt: skip
    stop: list[str] | None = option(
        None, "A text before which the answer ends; may be repeated.", kind=STOP
    )
    repetition_penalty: float | None = option(None, "", kind=FROM_0)


@dataclass(frozen=True, kw_only=True)
class CacheOptions(OptionGroup):
    """How mlx-lm quantises the cache while it decodes."""

    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("kv_group_size quantized_kv_start", "kv_bits", is_set, 8),
    )
    kv_bits: int | None = option(None, "Quantise the target's cache.", kind=NUMBER)
    kv_group_size: int = option(64, "Numbers that share a scale under --kv-bits.", kind=NUMBER)
    quantized_kv_start: int = option(5000, "Tokens before --kv-bits applies.", kind=NUMBER)


@dataclass(frozen=True, kw_only=True)
class DraftOptions(OptionGroup):
    """Speculative decoding, as in mlx-lm."""

    NEEDS: ClassVar[tuple[Need, ...]] = (Need("num_draft_tokens", "draft_model", is_set, "MODEL"),)
    draft_model: str | None = option(
        None, "Drafts for speculative decoding; the source can.", kind=MODEL
    )
    num_draft_tokens: int = option(2, "Tokens that --draft-model drafts at a time.", kind=COUNT)


NATIVE_LAYERS = "How many first cache layers the target reads itself; auto: as tuned."


@dataclass(frozen=True, kw_only=True)
class HealOptions(OptionGroup):
    """How the target reads the prompt itself, in the place of its translation."""

    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("heal_share", "heal", among("interleaved", "layers"), "interleaved"),
    )
    heal: str | None = option(
        None,
        "interleaved: the target reads the prompt behind the translation, between its tokens; "
        "layers: its first layers at once, the others so.",
        kind=one_of("interleaved", "layers"),
    )
    heal_share: float = option(
        0.5, "The share of its speed that decoding keeps.",
        kind=number("the share of its speed that decoding keeps, between 0 and 1",
                    lambda share: 0 < share < 1),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GuardOptions(OptionGroup):
    """Whether both models are compared over some tokens, and what is done in doubt."""

    NEEDS: ClassVar[tuple[Need, ...]] = (Need("on_doubt", "guard", bool, 32),)
    guard: int = option(
        0,
        "Compare both models over so many last tokens of the prompt, as the receipt does with 32; "
        "0: do not.",
        kind=TOKENS,
    )
    on_doubt: str = option(
        "warn",
        "If they are further apart than usual: warn; heal, as heal = interleaved; or reread, the "
        "target reads the prompt itself first.",
        kind=one_of("warn", "heal", "reread"),
    )


@dataclass(frozen=True, kw_only=True)
class HandoverOptions(HealOptions, GuardOptions):
    """How a prompt gets from one model to another, and what of it the target reads itself."""

    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("translator allow_mismatch native_layers native_head native_tail native_middle heal "
             "guard", "strategy", but("native"), "accelerator",
             "by which the target reads all of the prompt"),
    )  # fmt: skip
    strategy: str = option(
        "accelerator", "accelerator: the source reads the prompt; native: the target reads it.",
        kind=one_of("accelerator", "native"),
    )  # fmt: skip
    prefill_step_size: int = option(2048, "Tokens per prefill chunk.", kind=COUNT)
    translator: str | None = option(
        None, "A folder or Hub id; default: the local store's.", kind=TRANSLATOR
    )
    allow_mismatch: bool = option(
        False, "Accept a translator of other checkpoints of the same shape.", kind=SWITCH
    )
    native_layers: int | str | None = option(None, NATIVE_LAYERS, kind=LAYERS)
    native_head: int = option(0, "First tokens that the target reads itself.", kind=TOKENS)
    native_tail: int = option(0, "Last tokens that it reads itself.", kind=TOKENS)
    native_middle: int = option(
        0, "Tokens that it reads itself between these, at even distances.", kind=TOKENS
    )


GROUPS = (SamplingOptions, CacheOptions, DraftOptions, HandoverOptions)


def read_table(path: str, what: str, hint: str = "") -> dict[str, Any]:
    """The keys of a TOML file, or of JSON's where it is called so; ValueError if it has none."""
    form, read = ("JSON", json.loads) if path.endswith(".json") else ("TOML", tomllib.loads)
    try:
        found = read(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read ({error.strerror}){hint}") from None
    except (ValueError, RecursionError) as error:  # broken, or not UTF-8
        raise ValueError(f"{path} is not valid {form}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no keys; give KEY = VALUE, a line each")
    return found
