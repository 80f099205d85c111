"""What a server is told: one frozen dataclass, from a TOML file and the options of the verb."""

import difflib
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from kvlingo_mlx.options import read_table

API_KEY = "KVLINGO_API_KEY"  # the environment variable, which other users' `ps` does not show
AUTO = "auto"  # the model's name by which a client lets the rules choose


def _bytes(value: Any) -> Any:
    """A number of bytes, or a text such as "24GB" or "512 MiB"."""
    return int(TypeAdapter(ByteSize).validate_python(value)) if isinstance(value, str) else value


def _beginning(value: Any) -> Any:
    """How lines begin, as plain text; it was a regular expression once, and may have its ``^``."""
    value = value.removeprefix("^") if isinstance(value, str) else value
    if isinstance(value, str) and any(sign in value for sign in ("\\", ".*")):
        raise ValueError('expected how a line begins, as plain text such as "Model:"')
    return value


Text = Annotated[str, Strict(), Field(min_length=1)]
Whole = Annotated[int, Strict(), Field(ge=1)]
Seconds = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
Switch = Annotated[bool, Strict()]
Size = Annotated[int, Strict(), Field(ge=1), BeforeValidator(_bytes)]
Beginning = Annotated[Text, BeforeValidator(_beginning)]
Key = Annotated[str, Strict(), Field(min_length=1, pattern=r"^[!-~]+$")]


@dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class PairRule:
    """A rule for one model taking over from another one."""

    strategy: Literal["translate", "reread"] | None = None  # translate asks no receipt
    max_kl: Share | None = None  # as in Settings, for this pair
    shortest: Annotated[int, Strict(), Field(ge=0)] = 0  # tokens of a conversation to translate
    longest: Whole | None = None


@dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class Settings:
    """The settings of a server; times are in seconds, sizes in bytes. `serve --help` says more."""

    models: Annotated[dict[Text, Text], Field(min_length=1)]  # a folder or Hub id by its name
    translators: tuple[Text, ...] = ()  # none: those of the local store
    # The most that a translator's receipt may tell as KL in nats a token; others, and translators
    # without a receipt, are not used. None: all but useless ones are used.
    max_kl: Share | None = None
    pairs: dict[Text, PairRule] = field(default_factory=dict)  # by "SOURCE:TARGET"
    routes: Text | None = None  # a recipe, or a TOML file of rules, by which "auto" chooses
    host: Text = "127.0.0.1"  # others than this machine's own need a key
    port: Annotated[int, Strict(), Field(ge=0, le=65535)] = 8080  # 0 takes a free one
    api_key: Key | None = field(default=None, repr=False)
    allow_anyone: Switch = False  # to listen at another host without a key
    cors: tuple[Text, ...] = ()  # origins whose web pages may ask; "*" for all
    # Under mlx.launch, the names of the models that all hold together; none: the largest
    sharded: tuple[Text, ...] = ()
    memory_limit: Size | None = None  # of weights, lines and translators; None: all there is
    max_tokens: Whole = 4096  # of an answer, where a request gives none
    verbatim: Switch = False  # go on from the tokens as written, whatever a template changes
    heal: Literal["idle"] | None = None  # read behind translations while nothing is asked
    guard: Annotated[int, Strict(), Field(ge=0)] = 0  # tokens that are compared at a switch
    on_doubt: Literal["warn", "reread"] = "warn"
    prefill_step_size: Whole = 2048  # answers of others go on in between
    max_concurrent: Whole = 16  # answers that one model writes at once
    queue_limit: Whole = 64  # requests that may wait for their first token; more are told 429
    body_limit: Size = 32_000_000
    header_timeout: Seconds = 10.0
    body_timeout: Seconds = 60.0
    write_timeout: Seconds = 30.0  # that a client may take nothing of what waits for it
    keep_alive: Seconds = 10.0  # of silence before a stream is sent a sign of life
    worker_timeout: Seconds = 600.0  # without a sign of the models before a restart
    stop_timeout: Seconds = 20.0  # for running answers when the server stops, and then to save
    conversations: Text | None = None  # their folder; None: one in the user's data folder
    keep_conversations: Switch = True  # whether they survive the server's end
    # How lines of system prompts begin that agents change with every request or model, behind white
    # space and a list's mark. They do not count when histories are compared.
    volatile: tuple[Beginning, ...] = (
        "x-anthropic-billing-header:",
        "You are powered by the model",
        *("Model:", "Provider:", "Platform:"),  # Hermes's
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        if not (is_loopback(self.host) or self.api_key or self.allow_anyone):
            raise ValueError(
                f"host is {self.host}, which others can reach, and no key is set; "
                f"give --api-key (or {API_KEY}), or --allow-anyone"
            )
        if self.on_doubt != "warn" and not self.guard:
            raise ValueError(
                f"on_doubt is {self.on_doubt!r}, and nothing is compared; give guard 32 as well"
            )
        if AUTO in self.models:
            raise ValueError(f"a model is named {AUTO!r}, the name of routing; give another name")
        for name in self.sharded:
            if name not in self.models:
                raise ValueError(f"sharded names {name!r}; expected {', '.join(self.models)}")
        for pair in self.pairs:
            source, _, target = pair.partition(":")
            if source == target or not {source, target} <= set(self.models):
                raise ValueError(
                    f"pairs names {pair!r}; expected SOURCE:TARGET, two of {', '.join(self.models)}"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a client may give, ``auto`` included where there are rules."""
        return (*self.models, *([AUTO] if self.routes else []))


LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
OPTIONS = {"models": "model", "translators": "translator", "routes": "route"}  # named otherwise
NAMES = tuple(field.name for field in fields(Settings))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host, by its name or address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def read(config: str | None, options: Mapping[str, Any]) -> Settings:
    """The settings of a TOML file, if one is named, with the options that were given over them.

    Args:
        config: The file's path.
        options: Values by the settings' names; those that are None are taken as not given.

    Raises:
        ValueError: The file cannot be read, or a setting is unknown or out of range.
    """
    given = {} if config is None else read_table(config, "--config")
    for name in given:
        if name not in NAMES:
            raise ValueError(f"{config}: unknown setting {name!r}; {_nearest(name)}")
    wheres = dict.fromkeys(given, f"{config}: ")
    chosen = {name: value for name, value in options.items() if value is not None}
    given |= chosen
    wheres |= dict.fromkeys(chosen, "--")
    if os.environ.get(API_KEY):
        given.setdefault("api_key", os.environ[API_KEY])
    if not given.get("models"):
        raise ValueError(
            "no model is given; give --model NAME=MODEL once a model, or --config with [models]"
        )
    try:
        return Settings(**given)
    except ValidationError as error:
        raise ValueError(_refusal(error, given, wheres)) from None


def _refusal(error: ValidationError, given: dict[str, Any], wheres: dict[str, str]) -> str:
    """The first thing that is wrong, by pydantic's words, in one line."""
    first = error.errors(include_url=False, include_context=False)[0]
    told = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    told = told.replace("Unexpected keyword argument", "expected no such setting")
    if not first["loc"]:  # settings that do not go together
        return told
    name, *places = first["loc"]
    where, spelled = wheres.get(str(name), ""), str(name)
    inner: Any = given.get(spelled)
    if where == "--":
        spelled = OPTIONS.get(spelled, spelled).replace("_", "-")
    for part in places:  # pydantic's own parts, such as a union's branch, are left out
        if isinstance(part, int) or (isinstance(inner, dict) and part in inner):
            spelled, inner = f"{spelled}[{part!r}]", inner[part]
    shown = "not what it can be" if name == "api_key" else f"{first['input']!r:.80}"
    return f"{where}{spelled} is {shown}; {told[:1].lower()}{told[1:]}"


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name.replace("-", "_").lower(), NAMES, 1, 0.6)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(NAMES)}"
