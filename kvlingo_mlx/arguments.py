"""Checks of public functions' arguments: accepted values, and arguments that need others.

An argument that would have no effect is refused, because its user expects an effect. What options
in groups take and need is said in ``options``; here is what single functions have beside them.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

from kvlingo_mlx.group import ALONE
from kvlingo_mlx.options import (
    ABOVE_0,
    BITS,
    COUNT,
    FROM_0,
    GROUPS,
    MODEL,
    NUMBER,
    SHARE,
    SWITCH,
    TEXT,
    CacheOptions,
    DraftOptions,
    GuardOptions,
    HandoverOptions,
    HealOptions,
    Kind,
    Need,
    SamplingOptions,
    but,
    is_listed,
    is_path,
    is_set,
    kinds_of,
    named,
    needs_of,
    number,
    off,
    one_of,
    same,
    several,
    whole,
)

P = ParamSpec("P")
R = TypeVar("R")


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


def _of(*groups: type) -> tuple[Need, ...]:
    return tuple(need for group in groups for need in needs_of(group))


KV_GROUPS = Need("kv_group_size", "kv_bits", is_set, 8)
# Keys are the functions' qualified names.
FUNCTIONS: dict[str, tuple[Need, ...]] = {
    "load": (
        Need("revision lazy shard", "path_or_hf_repo",
             lambda path: not named(path, "LanguageModel"),
             told="on a model that is loaded already; leave it out, or give a folder or Hub id"),
    ),
    "stream_generate": (
        *_of(SamplingOptions, CacheOptions, DraftOptions, HandoverOptions), _thinking("prompt"),
    ),
    "folded_stream_generate": (*_of(SamplingOptions), KV_GROUPS, _thinking("prompt")),
    "folded_hand_over": (KV_GROUPS,),
    "hand_over": (
        _thinking("tokens"),
        *_of(GuardOptions),
        Need("guard", "prompt_cache", off, why="whose last predictions are not known"),
    ),
    "fit": (
        Need("nu", "assignment", lambda rule: not named(rule, "Assignment"),
             told="beside an Assignment, which lists the layers itself; leave out one of them"),
    ),
    "Conversation": (
        Need("translators switching eager on_missing offload quantize native_layers allow_mismatch "
             "heal guard", "models", several,
             told="with one model, since there is no hand-over; give two models or more"),
        *_of(HealOptions, GuardOptions),
        # `translators` and `eager` are accepted: users set "reprefill" to compare conversations.
        Need("on_missing quantize native_layers allow_mismatch heal guard", "switching",
             but("reprefill"), "alternated", "which translates nothing"),
    ),
    "Conversation.stream_reply": (
        *_of(SamplingOptions, DraftOptions),
        Need("first_token", "prefill", is_set, "a name"),
    ),
}  # fmt: skip


def _all(values: object, fits: Callable[[Any], bool]) -> bool:
    return is_listed(values) and all(map(fits, values))  # type: ignore[call-overload]


FUNCTION = Kind(callable, "a function")
FOLDER = Kind(is_path, "a folder's path")
# Keys are argument names. A name means the same in every function; a key "function.argument" is an
# exception for one function. An argument's default is always accepted.
KINDS: dict[str, Kind] = {
    **{name: kind for group in GROUPS for name, kind in kinds_of(group).items()},
    **dict.fromkeys("max_tokens nu memory".split(), NUMBER),
    "fit.tokens": whole("a number of tokens, 1 or more", 1),
    "fit.ridge": number("0 or more, or leave it out, and one is chosen for each map",
                        lambda value: 0 <= value < float("inf")),
    "hand_over.on_doubt": one_of("warn", "reread"),
    "hand_over.heal": one_of("idle", "layers"),
    "switching": one_of("alternated", "reprefill"),
    "on_missing": one_of("error", "reprefill"),
    "on_full": one_of("error", "drop_oldest"),
    "first_token": one_of("target", "source"),
    **dict.fromkeys(("offload", "where"), one_of("8bit", "disk")),
    "shard": Kind(lambda value: value == "tensor", "tensor, or leave it out"),
    "characters": whole("a number of characters, 0 or more", 0),
    **dict.fromkeys(
        "verbose enable_thinking lazy head_mixing state_maps eager verbatim overwrite force "
        "answers".split(), SWITCH),
    **dict.fromkeys(
        "address revision capture norm system key name prefill reasoning".split(), TEXT),
    **dict.fromkeys(
        "prefill_model decode_model source target path_or_hf_repo".split(), MODEL),
    **dict.fromkeys("sampler progress say suits until".split(), FUNCTION),
    "load_translator.path_or_hf_repo": Kind(is_path, "a translator's folder or Hub id"),
    **dict.fromkeys(
        ("find_translator.source", "find_translator.target"),
        Kind(lambda value: named(value, "LanguageModel", "TorchModel"),
             "what kvlingo_mlx.load returns")),
    **dict.fromkeys(("folder", "out"), FOLDER),
    "quantize": BITS,
    "logits_processors": Kind(
        lambda value: isinstance(value, Sequence) and all(map(callable, value)),
        "a list of functions"),
    "tools": Kind(lambda value: _all(value, lambda tool: isinstance(tool, Mapping)),
                  "a list of dicts"),
    "assignment": Kind(lambda value: isinstance(value, str) or named(value, "Assignment"),
                       "relative_depth, r2, greedy, or an Assignment"),
    "samples": Kind(lambda value: is_path(value) or is_listed(value),
                    "a list of records, or a JSONL file's path"),
    "models": Kind(
        lambda value: isinstance(value, Mapping) and all(
            isinstance(name, str) and MODEL.fits(model) for name, model in value.items()),
        "a dict of models by name, each a folder, a Hub id or a loaded model: {'small': model}",
    ),
    "data": Kind(lambda value: is_path(value) or _all(value, is_path),
                 "a file, a folder or a dataset's name, or a list of them"),
    **dict.fromkeys("ridge seconds patience".split(), number("a number")),
    "minutes": ABOVE_0,
    "max_kl": FROM_0,
    "min_recall": SHARE,
    "pair.nu": COUNT,
    "callbacks": Kind(lambda value: named(value, "Callbacks"), "a kvlingo_mlx.making.Callbacks"),
    "translators": Kind(is_listed, "a list of translators, each a folder, a Hub id or loaded"),
}  # fmt: skip
# Defaults of options that functions take by a TypedDict.
DEFAULTS = {each.name: each.default for group in GROUPS for each in fields(group)}
DEFAULTS["first_token"] = "target"


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
        usual = {**DEFAULTS, **defaults}
        given = {n: v for n, v in found.items() if n not in usual or not same(v, usual[n])}
        for name, value in given.items():
            kind = KINDS.get(f"{scope}.{name}", KINDS.get(name))
            if kind is not None:
                kind.check(name, value)
        for need in needs:
            need.check(given, {**defaults, **found})
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
            if scope not in SHARDED and getattr(model, "group", ALONE).several:
                raise ValueError(
                    f"{scope} takes whole models, and {model.name} is spread over "
                    f"{model.group.size} ranks; load it without shard"
                )
