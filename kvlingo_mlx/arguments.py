"""What arguments must be, and what they need beside them, to have an effect: one table of each.

An argument that would do nothing is refused: its user believes something that is not so. The
verbs' options have a table of their own, ``cli/needs.py``, of the same rows. Nothing here loads
MLX, so classes of ours are known by their names.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from kvlingo_mlx.errors import tell_new_name

P = ParamSpec("P")
R = TypeVar("R")
Spell = Callable[[str, Any], str]  # a name and its value, as a user types them


@dataclass(frozen=True)
class Need:
    """Options that do nothing unless another one has a certain value.

    Attributes:
        options: Their names, separated by spaces.
        partner: The other one, or several separated by spaces; a message shows the first.
        works: Whether they have an effect, given the partners' values.
        give: A value of the (first) partner with which they have one; None: leave it out.
        why: What the partner's value means, after a comma.
        told: What replaces the message's own words on the partner and on what to type.
    """

    options: str
    partner: str
    works: Callable[..., bool]
    give: Any = None
    why: str = ""
    told: str = ""


def is_set(value: Any) -> bool:
    """Whether an option was given, or a switch is on."""
    return value is not None and value is not False


def off(value: Any) -> bool:
    """Whether an option was left out, or a switch is off."""
    return not is_set(value)


def among(*values: Any) -> Callable[[Any], bool]:
    """A test for one of some values."""
    return lambda value: value in values


def but(*values: Any) -> Callable[[Any], bool]:
    """A test for anything but some values."""
    return lambda value: value not in values


def several(listed: Any) -> bool:
    """Whether there is more than one; none at all is refused elsewhere."""
    return not hasattr(listed, "__len__") or len(listed) != 1


def check_needs(
    needs: Iterable[Need], given: Iterable[str], values: Mapping[str, Any], spell: Spell
) -> None:
    """Refuse (ValueError) what was given and would do nothing.

    Args:
        needs: The rows that hold here.
        given: Names of what a user has set, defaults left out.
        values: Every value by name, defaults included.
        spell: How a user types a name and a value; the value None asks for the bare name.
    """
    chosen = set(given)
    for need in needs:
        unused = [name for name in need.options.split() if name in chosen]
        partners = need.partner.split()
        if unused and not need.works(*(values.get(name) for name in partners)):
            raise ValueError(_refusal(need, unused, values, spell))


def _refusal(need: Need, unused: Sequence[str], values: Mapping[str, Any], spell: Spell) -> str:
    names = ", ".join(spell(name, False if values[name] is False else None) for name in unused)
    verb, them = ("has", "it") if len(unused) == 1 else ("have", "them")
    said = f"{names} {verb} no effect "
    if need.told:
        return said + need.told
    partner = need.partner.split()[0]
    value, bare = values.get(partner), spell(partner, None)
    why = f", {need.why}" if need.why else ""
    if value is None or (value is False and spell(partner, False) == bare):
        wanted = spell(partner, need.give)
        return f"{said}without {bare}{why}; add {wanted}, or leave {them} out"
    if need.give is None or value is False:
        return f"{said}with {spell(partner, value)}{why}; leave out one or the other"
    wanted = spell(partner, need.give)
    return f"{said}with {spell(partner, value)}{why}; give {wanted}, or leave {them} out"


# ---- what public functions' arguments need ---------------------------------------------------

CACHE_BITS = Need("kv_group_size", "kv_bits", is_set, 8)
DRAFTED = Need("num_draft_tokens", "draft_model", is_set, "a model")


def _rendered(prompt: Any) -> bool:
    """Whether a chat template renders a prompt: it is messages, not a text nor token ids."""
    first = prompt[:1] if isinstance(prompt, Sequence) else ()
    return any(isinstance(message, Mapping) for message in first)


def _thinking(prompt: str) -> Need:
    """The template's switch, in a function whose prompt is called so."""
    return Need(
        "enable_thinking", prompt, _rendered,
        told="where no chat template renders the prompt; give messages, or leave it out",
    )  # fmt: skip


def _drawn(*off: float) -> Callable[..., bool]:
    """Whether tokens are drawn, or an option has the value that switches it off."""
    return lambda temperature, sampler, value: bool(temperature or sampler or value in off)


ALONE = "which chooses the tokens alone"
GREEDY = "since the likeliest token is taken"
SAMPLING = (
    Need("temperature top_p top_k min_p", "sampler", off, why=ALONE),
    Need("top_p", "temperature sampler top_p", _drawn(1), 0.7, GREEDY),
    Need("top_k", "temperature sampler top_k", _drawn(0), 0.7, GREEDY),
    Need("min_p", "temperature sampler min_p", _drawn(0), 0.7, GREEDY),
    Need("seed", "temperature sampler seed", _drawn(), 0.7, GREEDY),
)
BITS = (CACHE_BITS, Need("quantized_kv_start", "kv_bits", is_set, 8))
ONE_MODEL = "with one model, to which nothing is handed over; give two models or more"

# By the functions' own names; a row a line.
FUNCTIONS: dict[str, tuple[Need, ...]] = {
    "load": (
        Need("revision lazy", "path_or_hf_repo", lambda path: not named(path, "LanguageModel"),
             told="on a model that is loaded already; leave it out, or give a folder or Hub id"),
    ),
    "stream_generate": (
        *SAMPLING,
        *BITS,
        DRAFTED,
        _thinking("prompt"),
        Need("translator allow_mismatch native_layers native_head native_tail", "strategy",
             but("native"), "accelerator", "by which the decode model reads all of the prompt"),
    ),
    "folded_stream_generate": (*SAMPLING, CACHE_BITS, _thinking("prompt")),
    "folded_hand_over": (CACHE_BITS,),
    "hand_over": (_thinking("tokens"),),
    "fit": (
        Need("nu", "assignment", lambda rule: not named(rule, "Assignment"),
             told="beside an Assignment, which lists the layers itself; leave out one of them"),
    ),
    "Conversation": (
        Need("translators switching eager on_missing offload quantize native_layers allow_mismatch",
             "models", several, told=ONE_MODEL),
        # Translators and eager are left as they are: such a conversation is one to compare with.
        Need("on_missing quantize native_layers allow_mismatch", "switching", but("reprefill"),
             "alternated", "which translates nothing"),
    ),
    "Conversation.stream_reply": (
        *SAMPLING,
        *BITS,
        DRAFTED,
        Need("first_token", "prefill", is_set, "a name"),
    ),
}  # fmt: skip


# ---- what public functions' arguments must be ------------------------------------------------


def named(value: object, *names: str) -> bool:
    """Whether a value is of a class of such a name, or of its child."""
    return any(cls.__name__ in names for cls in type(value).__mro__)


def _path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


def _whole(value: object) -> bool:
    """A whole number of Python's or NumPy's; True and False are none."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not hasattr(value, "shape") or value.shape == ()


def _functions(value: object) -> bool:
    return isinstance(value, Sequence) and all(map(callable, value))


def _listed(value: object) -> bool:
    """A list or a generator, say; a text would be taken letter by letter, a dict for its keys."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


@dataclass(frozen=True)
class Kind:
    """What an argument may be, and the words for it."""

    fits: Callable[[Any], bool]
    words: str


NUMBER = Kind(_whole, "a whole number")
SWITCH = Kind(lambda value: type(value).__name__ in ("bool", "bool_"), "True or False")
TEXT = Kind(lambda value: isinstance(value, str), "a text")
FUNCTION = Kind(callable, "a function")
MODEL = Kind(
    lambda value: _path(value) or named(value, "LanguageModel"),
    "a folder, a Hub id, or what kvlingo_mlx.load returns",
)
TRANSLATOR = Kind(
    lambda value: _path(value) or named(value, "Translator"),
    "a folder, a Hub id, or what kvlingo_mlx.load_translator returns",
)
TOKENS = Kind(lambda value: _whole(value) and value >= 0, "a number of tokens, 0 or more")
LAYERS = Kind(
    lambda value: _whole(value) or (isinstance(value, str) and value == "auto"),
    "a number of layers, or 'auto'",
)

# By names: one name means the same in every function, but for those with the function's own name
# before it. A default is always allowed.
KINDS: dict[str, Kind] = {
    **dict.fromkeys(
        ("max_tokens", "prefill_step_size", "num_draft_tokens", "nu", "memory", "kv_bits",
         "kv_group_size", "quantized_kv_start"), NUMBER),
    **dict.fromkeys(("native_head", "native_tail"), TOKENS),
    "characters": Kind(lambda value: _whole(value) and value >= 0,
                       "a number of characters, 0 or more"),
    **dict.fromkeys(
        ("verbose", "enable_thinking", "allow_mismatch", "lazy", "head_mixing", "eager",
         "verbatim", "overwrite"), SWITCH),
    **dict.fromkeys(
        ("strategy", "switching", "revision", "capture", "norm", "on_missing", "offload", "system",
         "name", "prefill", "reasoning", "first_token", "where", "on_full"), TEXT),
    **dict.fromkeys(("prefill_model", "decode_model", "source", "target", "draft_model"), MODEL),
    **dict.fromkeys(("sampler", "progress", "solving"), FUNCTION),
    "path_or_hf_repo": MODEL,
    "load_translator.path_or_hf_repo": Kind(_path, "a translator's folder or Hub id"),
    "folder": Kind(_path, "a folder's path"),
    "translator": TRANSLATOR,
    "native_layers": LAYERS,
    "quantize": Kind(lambda value: type(value) is int and value in (8, 4),
                     "8 or 4, or leave it out for float weights"),
    "logits_processors": Kind(_functions, "a list of functions"),
    "tools": Kind(
        lambda value: _listed(value) and all(isinstance(tool, Mapping) for tool in value),
        "a list of dicts",
    ),
    "assignment": Kind(
        lambda value: isinstance(value, str) or named(value, "Assignment"),
        "relative_depth, r2, greedy, or an Assignment",
    ),
    "samples": Kind(
        lambda value: _path(value) or _listed(value), "a list of records, or a JSONL file's path"
    ),
    "models": Kind(
        lambda value: isinstance(value, Mapping) and all(
            isinstance(name, str) and MODEL.fits(model) for name, model in value.items()),
        "a dict of models by name, each a folder, a Hub id or a loaded model: {'small': model}",
    ),
    "translators": Kind(_listed, "a list of translators, each a folder, a Hub id or loaded"),
}  # fmt: skip
# What the functions themselves read and refuse: a prompt is of many kinds.
READ_ELSEWHERE = ("prompt", "tokens", "message", "messages", "prompt_cache")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A public function that refuses (ValueError) arguments of no use before it begins.

    What equals its default counts as left out: whoever passes all options on is not to blame.
    """
    signature = inspect.signature(function)
    defaults = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if parameter.default is not parameter.empty
    }
    scope = function.__qualname__.removesuffix(".__init__")
    needs = FUNCTIONS.get(scope, ())

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # Python's own words tell of arguments missing or unknown
            return function(*args, **kwargs)
        found = dict(bound.arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                more = found.pop(parameter.name, {})
                found |= {name: value for name, value in more.items() if value is not None}
        given = {n: v for n, v in found.items() if n not in defaults or not _same(v, defaults[n])}
        for name, value in given.items():
            kind = KINDS.get(f"{scope}.{name}", KINDS.get(name))
            if kind is not None and not kind.fits(value):
                raise ValueError(f"{name} is {_shown(value)}; give {kind.words}")
        check_needs(needs, given, {**defaults, **found}, _as_argument)
        return function(*args, **kwargs)

    return run


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A public function that takes arguments by their old names too, old=new, with a warning.

    Raises:
        TypeError: An argument is given by both names.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in names.keys() & kwargs.keys():
                if names[old] in kwargs:
                    raise TypeError(f"{old} and {names[old]} are one argument; give {names[old]}")
                tell_new_name(old, names[old])
                kwargs[names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return run

    return decorate


def _same(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def _as_argument(name: str, value: Any) -> str:
    return name if value is None or callable(value) else f"{name}={_shown(value)}"


def _shown(value: object) -> str:
    return f"{' '.join(repr(value).split()):.60}"
