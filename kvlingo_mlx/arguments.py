"""Checks of public arguments: a table of accepted values, and a table of required partners.

An argument that would have no effect is refused, because its user expects an effect. The
command-line options have a table of the same kind in ``cli/needs.py``. This module does not load
MLX, so it recognises the package's own classes by their names.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

P = ParamSpec("P")
R = TypeVar("R")
Spell = Callable[[str, Any], str]  # (name, value) -> the option as a user types it


@dataclass(frozen=True)
class Need:
    """Options that have no effect unless another option, the partner, has a certain value.

    Attributes:
        options: The names of these options, separated by spaces.
        partner: The partner's name. Several names are separated by spaces; messages show the first.
        works: Given the partners' values, returns whether the options have an effect.
        give: A value of the (first) partner that gives the options an effect; None: leave it out.
        why: What the partner's present value means; the message shows it after a comma.
        told: Replaces the part of the message that names the partner and says what to type.
    """

    options: str
    partner: str
    works: Callable[..., bool]
    give: Any = None
    why: str = ""
    told: str = ""


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


def check_needs(
    needs: Iterable[Need], given: Iterable[str], values: Mapping[str, Any], spell: Spell
) -> None:
    """Refuse (ValueError) given options that would have no effect.

    Args:
        needs: The rows to check.
        given: The names of the options that a user has set; defaults are left out.
        values: The value of every option by name, defaults included.
        spell: Returns how a user types a name and a value; for the value None, the bare name.
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


ADDRESS = " at 0x"  # in what Python shows of an object that has no text of its own


# ---- partners that the arguments of public functions need ------------------------------------

CACHE_BITS = Need("kv_group_size", "kv_bits", is_set, 8)
DRAFTED = Need("num_draft_tokens", "draft_model", is_set, "a model")


def _rendered(prompt: Any) -> bool:
    """Whether a chat template renders the prompt: it is messages, neither text nor token ids."""
    first = prompt[:1] if isinstance(prompt, Sequence) else ()
    return any(isinstance(message, Mapping) for message in first)


def _thinking(prompt: str) -> Need:
    """The row of ``enable_thinking``, for a function whose prompt argument has the given name."""
    return Need(
        "enable_thinking", prompt, _rendered,
        told="where no chat template renders the prompt; give messages, or leave it out",
    )  # fmt: skip


def _drawn(*off: float) -> Callable[..., bool]:
    """A test: tokens are sampled, or the option's value is one that switches the option off."""
    return lambda temperature, sampler, value: bool(temperature or sampler or value in off)


ALONE = "since a sampler chooses the tokens by itself"
GREEDY = "since the likeliest token is taken"
SAMPLING = (
    Need("temperature top_p top_k min_p", "sampler", off, why=ALONE),
    Need("top_p", "temperature sampler top_p", _drawn(1), 0.7, GREEDY),
    Need("top_k", "temperature sampler top_k", _drawn(0), 0.7, GREEDY),
    Need("min_p", "temperature sampler min_p", _drawn(0), 0.7, GREEDY),
    Need("seed", "temperature sampler seed", _drawn(), 0.7, GREEDY),
)
BITS = (CACHE_BITS, Need("quantized_kv_start", "kv_bits", is_set, 8))
HEALED = Need("heal_share", "heal", is_set, "interleaved")
DOUBTED = Need("on_doubt", "guard", bool, 32)
ONE_MODEL = "with one model, since there is no hand-over; give two models or more"

# Keys are the functions' qualified names.
FUNCTIONS: dict[str, tuple[Need, ...]] = {
    "load": (
        Need("revision lazy shard", "path_or_hf_repo",
             lambda path: not named(path, "LanguageModel"),
             told="on a model that is loaded already; leave it out, or give a folder or Hub id"),
    ),
    "stream_generate": (
        *SAMPLING,
        *BITS,
        DRAFTED,
        _thinking("prompt"),
        Need("translator allow_mismatch native_layers native_head native_tail heal guard",
             "strategy", but("native"), "accelerator",
             "by which the target reads all of the prompt"),
        HEALED,
        DOUBTED,
    ),
    "folded_stream_generate": (*SAMPLING, CACHE_BITS, _thinking("prompt")),
    "folded_hand_over": (CACHE_BITS,),
    "hand_over": (
        _thinking("tokens"),
        DOUBTED,
        Need("guard", "prompt_cache", off, why="whose last predictions are not known"),
    ),
    "fit": (
        Need("nu", "assignment", lambda rule: not named(rule, "Assignment"),
             told="beside an Assignment, which lists the layers itself; leave out one of them"),
    ),
    "Conversation": (
        Need("translators switching eager on_missing offload quantize native_layers allow_mismatch "
             "heal guard", "models", several, told=ONE_MODEL),
        HEALED,
        DOUBTED,
        # `translators` and `eager` are accepted: users set "reprefill" to compare conversations.
        Need("on_missing quantize native_layers allow_mismatch heal guard", "switching",
             but("reprefill"), "alternated", "which translates nothing"),
    ),
    "Conversation.stream_reply": (
        *SAMPLING,
        *BITS,
        DRAFTED,
        Need("first_token", "prefill", is_set, "a name"),
    ),
}  # fmt: skip


# ---- values that the arguments of public functions accept ------------------------------------


def named(value: object, *names: str) -> bool:
    """Whether a value's class, or one of its base classes, has one of the given names."""
    return any(cls.__name__ in names for cls in type(value).__mro__)


def _path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


def _whole(value: object) -> bool:
    """Whether a value is a whole number of Python's or NumPy's; True and False are not."""
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
    """Whether a value is an iterable such as a list or a generator, but no text and no dict."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


@dataclass(frozen=True)
class Kind:
    """A test of an argument's value, and the words that describe accepted values."""

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

# Keys are argument names. A name means the same in every function; a key "function.argument" is an
# exception for one function. An argument's default is always accepted.
KINDS: dict[str, Kind] = {
    **dict.fromkeys(
        ("max_tokens", "prefill_step_size", "num_draft_tokens", "nu", "memory", "kv_bits",
         "kv_group_size", "quantized_kv_start"), NUMBER),
    **dict.fromkeys(("native_head", "native_tail", "guard"), TOKENS),
    "fit.tokens": Kind(lambda value: _whole(value) and value >= 1, "a number of tokens, 1 or more"),
    "characters": Kind(lambda value: _whole(value) and value >= 0,
                       "a number of characters, 0 or more"),
    **dict.fromkeys(
        ("verbose", "enable_thinking", "allow_mismatch", "lazy", "head_mixing", "state_maps",
         "eager", "verbatim", "overwrite", "force", "answers"), SWITCH),
    "address": TEXT,
    **dict.fromkeys(
        ("strategy", "switching", "revision", "capture", "norm", "on_missing", "offload", "system",
         "key", "sent", "name", "prefill", "reasoning", "first_token", "where", "on_full",
         "heal", "on_doubt", "shard"), TEXT),
    **dict.fromkeys(("prefill_model", "decode_model", "source", "target", "draft_model"), MODEL),
    **dict.fromkeys(("sampler", "progress", "solving", "say", "suits", "until"), FUNCTION),
    "path_or_hf_repo": MODEL,
    "load_translator.path_or_hf_repo": Kind(_path, "a translator's folder or Hub id"),
    **dict.fromkeys(
        ("find_translator.source", "find_translator.target"),
        Kind(lambda value: named(value, "LanguageModel"), "what kvlingo_mlx.load returns")),
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
    "data": Kind(
        lambda value: _path(value) or (_listed(value) and all(map(_path, value))),
        "a file, a folder or a dataset's name, or a list of them",
    ),
    **dict.fromkeys(("minutes", "max_kl", "min_recall", "ridge", "seconds", "heal_share",
                     "patience"), Kind(
        lambda value: type(value) in (int, float), "a number")),
    "seed": Kind(lambda value: _whole(value) and value >= 0, "a whole number, 0 or more"),
    "out": Kind(_path, "a folder's path"),
    "told": Kind(lambda value: named(value, "Told"), "a kvlingo_mlx.making.Told"),
    "translators": Kind(_listed, "a list of translators, each a folder, a Hub id or loaded"),
}  # fmt: skip
# Arguments that the functions check themselves, because they accept many types.
READ_ELSEWHERE = ("prompt", "tokens", "message", "messages", "prompt_cache")


# What an argument is called by other functions here, and by other libraries.
OTHER_NAMES = {
    "source": "prefill_model", "target": "decode_model", "prefill_model": "source",
    "decode_model": "target", "temp": "temperature", "max_new_tokens": "max_tokens",
    "thinking": "enable_thinking",
}  # fmt: skip
OWN_WORDS = ("Conversation.resume",)  # what refuses unknown arguments itself


@functools.cache
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's arguments, and of the options that it takes by a TypedDict."""
    found: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            (options,) = get_args(get_type_hints(function)[name])
            found += options.__annotations__
        elif name not in ("self", "cls"):
            found.append(name)
    return tuple(found)


def _check_names(function: Callable[..., Any], scope: str, given: Iterable[str]) -> None:
    """Refuse (ValueError) a keyword that is no argument; the message names the nearest one."""
    known = _names(function)
    for name in given:
        if name in known:
            continue
        near = [OTHER_NAMES[name]] if OTHER_NAMES.get(name) in known else []
        near = near or difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"its arguments are {', '.join(known)}"
        raise ValueError(f"{name} is no argument of {scope}; {hint}")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a public function so that it first refuses (ValueError) invalid or useless arguments.

    An argument equal to its default counts as left out, so a caller may pass on all options.
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
        if scope not in OWN_WORDS:
            _check_names(function, scope, kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # Python's own message names missing arguments
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
        _check_models(scope, found)
        return function(*args, **kwargs)

    return run


# What takes a part of a model.
SHARDED = (
    *("load", "find_translator", "generate", "stream_generate", "hand_over"),
    *("Conversation", "Conversation.resume", "Conversation.reply", "Conversation.stream_reply"),
)
# What takes a model on another machine, by function.
REMOTE = {
    **dict.fromkeys(("generate", "stream_generate", "hand_over"), "prefill_model"),
    "find_translator": "source",
}


def _check_models(scope: str, values: Mapping[str, Any]) -> None:
    """Refuse (ValueError) a model of which this process holds a part or nothing."""
    for name, value in values.items():
        for model in value.values() if isinstance(value, Mapping) else (value,):
            if not named(model, "LanguageModel"):
                continue
            if getattr(model, "address", None) is not None and REMOTE.get(scope) != name:
                raise ValueError(
                    f"{name} is {model.name} on {model.address}, and a model on another machine "
                    "can only be the prefill model of generate, stream_generate and hand_over; "
                    "load it here"
                )
            if scope not in SHARDED and getattr(model, "part", None) is not None:
                raise ValueError(
                    f"{scope} takes whole models, and {model.name} is spread over "
                    f"{model.part.size} ranks; load it without shard"
                )


def _same(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def _as_argument(name: str, value: Any) -> str:
    plain = value is None or callable(value) or ADDRESS in repr(value)
    return name if plain else f"{name}={_shown(value)}"


def _shown(value: object) -> str:
    """A value as a user would type it; of objects without such a form the type."""
    text = " ".join(repr(value).split())
    return f"of type {type(value).__name__}" if ADDRESS in text else f"{text:.60}"
