"""What a server is told: options in groups, to which the command line adds its verbs' own."""

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from kvlingo_mlx.options import (
    COUNT,
    FROM_0,
    SECONDS,
    TOKENS,
    Kind,
    Need,
    OptionGroup,
    one_of,
    option,
    whole,
)

API_KEY = "KVLINGO_API_KEY"  # the environment variable, which other users' `ps` does not show
AUTO = "auto"  # the model's name by which a client lets the rules choose
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"

SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b?", re.IGNORECASE | re.ASCII)
IDLE = Kind(lambda value: value == "idle", "idle, or leave it out")


def size_of(text: str) -> int:
    """The bytes of a size such as ``24GB``; ValueError for any other text."""
    if (found := SIZE.fullmatch(text)) is None:
        raise ValueError
    step = 1024 if found[3] else 1000
    return int(float(found[1]) * step ** " kmgt".index(found[2].lower() or " "))


BYTES = Kind(COUNT.fits, "a number of bytes: 24GB, 512MiB", size_of)


@dataclass(frozen=True)
class PairRule:
    """A rule for one model taking over from another one."""

    strategy: Literal["translate", "reread"] | None = None  # translate asks no receipt
    max_kl: float | None = None  # as for all pairs, for this one
    shortest: Annotated[int, range(2**31)] = 0  # tokens of a conversation to translate
    longest: Annotated[int, range(1, 2**31)] | None = None


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(OptionGroup):
    """The options of every server."""

    host: str = option(
        "127.0.0.1", "Address to listen at; others than this machine's own need a key."
    )
    port: int = option(
        8080, "Port to listen at; 0 takes a free one.", kind=whole("0 to 65535", 0, 65535)
    )
    api_key: str | None = option(
        None, "What clients must send; better in the environment: KVLINGO_API_KEY.", secret=True
    )
    allow_anyone: bool = option(False, "Listen at other hosts without a key.", "--allow-anyone")
    write_timeout: float = option(30.0, "Seconds that a client may take nothing.", kind=SECONDS)
    log_level: str = option(
        "info", "debug, info, warning or error.", kind=one_of("debug", "info", "warning", "error")
    )


@dataclass(frozen=True, kw_only=True)
class ServerOptions(NetworkOptions):
    """The options of a server of conversations, but for what has a form of its own there."""

    NEEDS: ClassVar[tuple[Need, ...]] = (Need("on_doubt", "guard", bool, 32),)
    max_kl: float | None = option(
        None, "Do not use translators whose receipt tells more than this many nats a token.",
        kind=FROM_0,
    )  # fmt: skip
    cors: list[str] | None = option(None, "An origin whose web pages may ask; * for all.")
    sharded: list[str] | None = option(
        None, "Under mlx.launch, a name whose model all hold together; default: the largest."
    )
    memory_limit: int | None = option(
        None, "Memory of weights, conversations and translators: 24GB; default: all there is.",
        kind=BYTES,
    )  # fmt: skip
    max_tokens: int = option(4096, "Longest answer where a request gives none.", kind=COUNT)
    verbatim: bool = option(
        False, "Go on from the tokens as written, even where a template changes earlier turns."
    )
    heal: str | None = option(
        None, "idle: while nothing is asked, models read what they hold translated, in its place.",
        kind=IDLE,
    )  # fmt: skip
    guard: int = option(
        0, "At a switch, compare both models over so many tokens; 0: do not.", kind=TOKENS
    )
    on_doubt: str = option(
        "warn", "If they are further apart than usual: warn in the log, or reread.",
        kind=one_of("warn", "reread"),
    )  # fmt: skip
    prefill_step_size: int = option(2048, "Tokens per prefill chunk.", kind=COUNT)
    max_concurrent: int = option(16, "Answers that a model writes at once.", kind=COUNT)
    queue_limit: int = option(64, "Requests that may wait for their first token.", kind=COUNT)
    body_limit: int = option("32MB", "The largest request.", kind=BYTES)
    header_timeout: float = option(10.0, "Seconds for a request's headers.", kind=SECONDS)
    body_timeout: float = option(60.0, "Seconds for a request's body.", kind=SECONDS)
    keep_alive: float = option(
        10.0, "Seconds of silence before a stream is kept open.", kind=SECONDS
    )
    worker_timeout: float = option(
        600.0, "Seconds without a sign of the models before the server is restarted.", kind=SECONDS
    )
    stop_timeout: float = option(
        20.0, "Seconds that running answers have when the server stops.", kind=SECONDS
    )
    conversations: str | None = option(
        None, "Folder of conversations on disk; default: in the user's data folder."
    )
    keep_conversations: bool = option(True, "Keep conversations when the server ends.")
    volatile: list[str] | None = option(
        None, "How lines of system prompts begin that change with every request; default: those of "
        "known agents.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings(ServerOptions):
    """The settings of a server; times are in seconds, sizes in bytes."""

    models: dict[str, str]  # a folder or Hub id by its name
    translators: list[str] | None = None  # None: those of the local store
    pairs: dict[str, PairRule] = field(default_factory=dict)  # by "SOURCE:TARGET"
    routes: str | None = None  # a recipe, or a TOML file of rules, by which "auto" chooses
    body_limit: int = 32_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.models:
            raise ValueError(
                "no model is given; give NAME=MODEL once a model, or --config with [models]"
            )
        if not re.fullmatch("[!-~]+", self.api_key or "none"):
            raise ValueError("api_key is not what a header can hold; give letters and digits")
        if not (is_loopback(self.host) or self.api_key or self.allow_anyone):
            raise ValueError(
                f"host is {self.host}, which others can reach, and no key is set; "
                f"give --api-key (or {API_KEY}), or --allow-anyone"
            )
        if AUTO in self.models:
            raise ValueError(f"a model is named {AUTO!r}, the name of routing; give another name")
        for name in self.sharded or ():
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


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host, by its name or address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
