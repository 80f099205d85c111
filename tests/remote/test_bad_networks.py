"""What goes wrong between two machines: nothing wrong is accepted, and nothing hangs."""

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.errors import RemoteModelError
from kvlingo_mlx.format.geometry import digest_of
from kvlingo_mlx.remote import client, model
from kvlingo_mlx.remote.order import Order
from tests.support import tiny
from tests.support.native_caches import entries
from tests.support.network import Network, Offered, offered
from tests.support.processes import until

pytestmark = pytest.mark.filterwarnings("ignore::kvlingo_mlx.KVLingoWarning")
MANY = "KVLINGO_EXAMPLES" in os.environ
CUTS = 40
PROMPT = tiny.random_tokens(401)
STEP = 8  # fifty chunks
SHAPE = dict(layers=2, kv_heads=2, head_dim=16)
Hand = Callable[..., list[np.ndarray]]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """A source, a target and their translator."""
    root = tmp_path_factory.mktemp("bad")
    folders = [
        tiny.write_tiny_model(root / name, "qwen3", seed=seed, **SHAPE)
        for seed, name in enumerate("ab")
    ]
    tiny.write_random_translator(root / "t", *folders, nu=1)
    return (*map(kv.load, folders), kv.load_translator(root / "t"))


@pytest.fixture(scope="module")
def server(ends: tuple[Any, Any, Any]) -> Iterator[Offered]:
    with offered(ends[0]) as found:
        yield found


@pytest.fixture
def network(server: Offered) -> Iterator[Network]:
    found = Network(server.port)
    yield found
    found.close()


@pytest.fixture
def hand(ends: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch) -> Hand:
    """A hand-over from a source by its address; its arrays."""
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.002)

    def hand_over(source: Any, tokens: list[int] = PROMPT) -> list[np.ndarray]:
        options = {"translator": ends[2], "prefill_step_size": STEP}
        return entries(kv.hand_over(source, ends[1], tokens, **options))

    return hand_over


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(map(np.array_equal, one, other))


def remote(network: Network, **options: Any) -> Any:
    return kv.connect(network.address, **{"patience": 30.0, **options})


@pytest.mark.parametrize("seed", range(10 if MANY else 1))
def test_connections_cut_at_random_bytes(
    ends: tuple[Any, Any, Any], network: Network, hand: Hand, seed: int
) -> None:
    """Heads, bodies and requests; a transfer goes on at its chunk, and the cache is the same."""
    rng = random.Random(seed)
    gaps = (rng.choice((rng.randrange(1, 400), rng.randrange(400, 20_000))) for _ in range(CUTS))
    network.cut(gaps)
    own, handed = hand(ends[0]), 0
    while network.cuts < CUTS and handed < 20:
        assert equal(own, hand(remote(network)))
        handed += 1
    assert network.cuts == CUTS


def test_a_cut_answer_goes_on_at_its_chunk(
    ends: tuple[Any, Any, Any], network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut once in the second of four chunks: the first is not sent again, none is read again."""
    from kvlingo_mlx.serving import reader

    source, packed, made = remote(network), reader.packed, []
    monkeypatch.setattr(reader, "packed", lambda *given: made.append(given) or packed(*given))
    network.cut(iter([60_000]))
    cache = kv.hand_over(source, ends[1], PROMPT, translator=ends[2], prefill_step_size=100)
    chunk = 4 * 100 * SHAPE["layers"] * 2 * SHAPE["kv_heads"] * SHAPE["head_dim"]
    assert network.cuts == 1 and 4 * chunk < network.passed < 5 * chunk + 20_000
    assert cache[0].offset == 400 and len(made) == 4


def flips(rng: random.Random, share: float) -> Callable[[bytes], bytes]:
    """Changes a byte of some of what passes, at random."""

    def spoil(data: bytes) -> bytes:
        if rng.random() >= share:
            return data
        place, found = rng.randrange(len(data)), bytearray(data)
        found[place] ^= 1 << rng.randrange(8)
        return bytes(found)

    return spoil


@pytest.mark.parametrize("seed", range(50 if MANY else 4))
def test_no_flipped_byte_is_accepted(
    ends: tuple[Any, Any, Any], network: Network, hand: Hand, seed: int
) -> None:
    """Whatever is flipped, heads included: the right cache, or an error in one line."""
    network.spoil = flips(random.Random(seed), 0.1)
    try:
        found = hand(remote(network, patience=1.0))
    except RemoteModelError as error:
        assert "\n" not in str(error)
    else:
        assert equal(found, hand(ends[0]))


def test_flipped_bytes_of_chunks_are_fetched_again(
    ends: tuple[Any, Any, Any], network: Network, hand: Hand
) -> None:
    """A few, and the cache is right; always, and it is told after three times."""
    source, own = remote(network), hand(ends[0])
    flipped = []

    def inner_byte(every: int) -> Callable[[bytes], bytes]:
        count = itertools.count(1)

        def spoil(data: bytes) -> bytes:
            if len(data) < 1000 or next(count) % every:
                return data
            flipped.append(place := len(data) // 2)
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

        return spoil

    network.spoil = inner_byte(5)
    assert equal(own, hand(source)) and flipped
    network.spoil = inner_byte(1)
    with pytest.raises(RemoteModelError, match=r"damaged \(its sha256 is another one\), 3 times"):
        hand(source)


def test_what_is_right_and_was_not_asked_for_is_refused(
    ends: tuple[Any, Any, Any], server: Offered, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that sends other positions or other layers, with the right digest."""
    from kvlingo_mlx.serving import reader

    packed = reader.packed
    later = {"start": "8", "stop": "16"}
    for change in (
        lambda arrays, told: (arrays, {**told, **later}),
        lambda arrays, told: (arrays, {**told, "capture": "post_rope"}),
        lambda arrays, told: (
            {n: a[:, ::-1] if a.ndim > 2 else a.T for n, a in arrays.items()},
            told,
        ),
        lambda arrays, told: (dict(zip(sorted(arrays)[1:], arrays.values(), strict=False)), told),
    ):

        def changed(arrays: Any, told: Any, change: Any = change) -> bytes:
            return packed(*change(arrays, told))

        monkeypatch.setattr(reader, "packed", changed)
        with pytest.raises(RemoteModelError, match="another size|is not what was asked for"):
            hand(kv.connect(server.address))
    monkeypatch.setattr(reader, "packed", packed)
    assert equal(hand(ends[0]), hand(kv.connect(server.address)))


def test_a_server_that_is_started_again(ends: tuple[Any, Any, Any], hand: Hand) -> None:
    """In the middle: it reads again, and sends only what has not come."""
    own = hand(ends[0])
    first = Offered(ends[0])
    network, later = Network(first.port), []
    source = remote(network)

    def restart() -> None:
        first.stop()
        later.append(Offered(ends[0]))
        network.port = later[0].port

    network.events.append((60_000, restart))
    assert equal(own, hand(source))
    assert len(later) == 1 and not later[0].jobs
    later[0].stop()
    network.close()


def test_a_server_with_another_model(
    ends: tuple[Any, Any, Any], hand: Hand, tmp_path: Path
) -> None:
    """Started again with another one; and a translator for other models."""
    other = kv.load(tiny.write_tiny_model(tmp_path / "c", "qwen3", seed=9, **SHAPE | {"layers": 3}))
    with offered(ends[0]) as first, offered(other) as second:
        network = Network(first.port)
        source = remote(network)
        network.port = second.port
        with pytest.raises(RemoteModelError, match="refuses: this machine offers .*/c now, not"):
            hand(source)
        with pytest.raises(kv.IncompatibleTranslatorError, match="cache layers: 3, expected 2"):
            hand(kv.connect(second.address))
        network.close()


def test_a_server_that_is_gone_for_good(ends: tuple[Any, Any, Any], hand: Hand) -> None:
    """Before, and in the middle: an error within seconds."""
    first = Offered(ends[0])
    network = Network(first.port)
    source, address = remote(network, patience=1.0), network.address

    def end() -> None:
        first.stop()
        network.close()

    network.events.append((60_000, end))
    begun = time.monotonic()
    with pytest.raises(RemoteModelError, match="cannot be reached"):
        hand(source)
    with pytest.raises(
        RemoteModelError, match=r"cannot be reached \(.*start `kvlingo-mlx serve-pre"
    ):
        kv.connect(address)
    assert time.monotonic() - begun < 60


def test_a_machine_that_falls_silent(
    ends: tuple[Any, Any, Any], server: Offered, hand: Hand
) -> None:
    """It takes connections and says nothing any more."""
    network = Network(server.port)
    source = remote(network, patience=0.5)
    network.events.append((60_000, lambda: setattr(network, "rate", 0.1)))
    with pytest.raises(RemoteModelError, match="cannot be reached .*timed out"):
        hand(source)
    network.close()


@pytest.mark.parametrize("what", ["capture.move", "packed"])
def test_a_reader_that_fails_is_told(
    server: Offered, hand: Hand, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """While it reads, and while it makes a file of what it read."""
    from kvlingo_mlx.serving import reader

    def fails(*_: Any) -> Any:
        raise RuntimeError("out of\nluck")

    module, _, name = what.rpartition(".")
    monkeypatch.setattr(getattr(reader, module) if module else reader, name, fails)
    with pytest.raises(
        RemoteModelError,
        match=r"^127\.0\.0\.1:\d+: .* did not read the prompt: RuntimeError: out of.luck",
    ):
        hand(kv.connect(server.address))


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Chunks are made slowly while the event is cleared."""
    from kvlingo_mlx.serving import reader

    packed, free = reader.packed, threading.Event()
    free.set()

    def made(*given: Any) -> bytes:
        free.wait(0.3)
        return packed(*given)

    monkeypatch.setattr(reader, "packed", made)
    yield free
    free.set()


def begun(source: Any, session: str) -> Iterator[bytes]:
    """The chunks of an order of fifty chunks."""
    wanted = {"keys.0": 0, "values.0": 0}
    order = Order(source.digest, session, tuple(PROMPT[:400]), STEP, "pre_norm", wanted)
    return client.Client(source.client.address).stream(order, 10**6)


def test_jobs_take_turns_and_there_is_a_limit(
    ends: tuple[Any, Any, Any], hand: Hand, slowly: threading.Event
) -> None:
    own = hand(ends[0])
    with offered(ends[0], jobs=2) as server:
        source = kv.connect(server.address)
        with ThreadPoolExecutor(2) as pool:
            assert all(equal(own, each) for each in pool.map(hand, [source, source]))
        until(lambda: not server.jobs)
        slowly.clear()
        x, y = (begun(source, name) for name in "xy")
        first = [next(x), next(y)]
        assert len(server.jobs) == 2 and first[0] == first[1]
        with pytest.raises(RemoteModelError, match="has no room for this: 2 jobs are read already"):
            hand(kv.connect(server.address, patience=0.5))
        x.close()  # whose job makes room
        slowly.set()
        assert equal(own, hand(source))
        assert len(list(y)) == 49


def test_jobs_without_a_connection_go(
    ends: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch, slowly: threading.Event
) -> None:
    """A client that vanished holds no caches for long."""
    from kvlingo_mlx.serving import reader

    monkeypatch.setattr(reader, "IDLE_S", 0.3)
    with offered(ends[0], jobs=1) as server:
        slowly.clear()
        chunks = begun(kv.connect(server.address), "x")
        next(chunks)
        assert len(server.jobs) == 1
        chunks.close()
        until(lambda: not server.jobs)


def test_a_client_that_leaves_ends_its_job(
    ends: tuple[Any, Any, Any], server: Offered, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that nobody takes, or Ctrl-C, in the middle of a slow transfer."""
    from kvlingo_mlx import caches
    from kvlingo_mlx.serving import reader

    source = remote(network)
    monkeypatch.setattr(reader, "IDLE_S", 0.3)
    network.rate, others = 30_000, set(server.jobs)

    class StopError(BaseException):
        pass

    def interrupt(*_: Any) -> Any:
        raise StopError

    plain, caches.append = caches.append, interrupt
    try:
        with pytest.raises(StopError):
            kv.hand_over(source, ends[1], PROMPT, translator=ends[2], prefill_step_size=STEP)
    finally:
        caches.append = plain
    until(lambda: not set(server.jobs) - others)
    left = [t.name for t in threading.enumerate() if "Transfer" in t.name or "_run" in t.name]
    assert not left


def test_keys(ends: tuple[Any, Any, Any], hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    with offered(ends[0], api_key="right") as server:
        with pytest.raises(RemoteModelError, match="refuses: no key was given"):
            kv.connect(server.address)
        with pytest.raises(RemoteModelError, match="refuses: a wrong key was given"):
            kv.connect(server.address, key="wrong")
        assert equal(hand(ends[0]), hand(kv.connect(server.address, key="right")))
        monkeypatch.setenv("KVLINGO_API_KEY", "right")
        assert equal(hand(ends[0]), hand(server.address))
    assert "right" not in repr(kv.connect) and "right" not in repr(client.Client(None, "right"))


def test_versions(server: Offered, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kv.connect(server.address)
    monkeypatch.setattr(model, "__version__", "9.9")
    with pytest.raises(RemoteModelError, match=r"runs kvlingo-mlx 0\.\d+\.\d+, and this is 9\.9"):
        kv.connect(server.address)
    assert found.mlx_lm


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_what_is_no_such_server(answer: bytes) -> None:
    """Something else listens there."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                while True:
                    connection, _ = listener.accept()
                    connection.recv(1000)
                    connection.sendall(answer)
                    connection.close()
            except OSError:
                return

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(RemoteModelError, match="is it a `kvlingo|cannot be reached"):
            kv.connect(f"127.0.0.1:{listener.getsockname()[1]}", patience=0.3)
        listener.shutdown(socket.SHUT_RDWR)


def test_what_needs_more_than_states_is_refused(
    ends: tuple[Any, Any, Any], server: Offered, tmp_path: Path
) -> None:
    source, target, translator = ends
    far = kv.connect(server.address)
    given: dict[str, Any] = {"translator": translator}
    for options, told in (
        ({"guard": 8}, "which cannot be used with guard; leave one"),
        (
            {"draft_model": far, "max_tokens": 3},
            "draft_model is .* on 127.*can only be the prefill",
        ),
    ):
        with pytest.raises((ValueError, kv.UnsupportedModelError), match=told):
            kv.generate(far, target, PROMPT, **given, **options)
    for each in (far, server.address):
        with pytest.raises(ValueError, match="strategy is 'native', which does not need"):
            kv.generate(each, target, PROMPT, strategy="native")
    with pytest.raises(kv.MissingModelError, match="is an address, and a model on another mach"):
        kv.generate(server.address, target, PROMPT, **given, draft_model=server.address)
    with pytest.raises(ValueError, match="prompt_cache holds caches of .*reads the prompt there"):
        kv.hand_over(far, target, PROMPT, **given, prompt_cache=[])
    with pytest.raises(ValueError, match="decode_model is .* can only be the prefill model"):
        kv.generate(source, far, PROMPT, **given)
    for call in (
        lambda other: kv.folded_generate(other, target, PROMPT),
        lambda other: kv.fit(other, target, []),
        lambda other: kv.Conversation({"a": other, "b": target}),
        kv.load,
    ):
        with pytest.raises(ValueError, match="on another machine can only be the prefill model"):
            call(far)
        with pytest.raises(kv.MissingModelError, match="is an address, and a model on another"):
            call(server.address)
    with pytest.raises(kv.MissingModelError, match="is an address, and a model on another mach"):
        kv.generate(source, server.address, PROMPT)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"address": "qwen"}, "give host:port"),
        ({"address": "host:99999"}, "give host:port"),
        ({"address": "h:1", "patience": 0}, "a number of seconds above 0"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        kv.connect(**options)


def test_orders_that_make_no_sense(ends: tuple[Any, Any, Any], server: Offered) -> None:
    """As a stranger might send them: refused in a line, and the server lives on."""
    import json
    import urllib.request

    from kvlingo_mlx.remote.order import Order

    digest = digest_of(model.facts_of(ends[0]))
    good = asdict(Order(digest, "s", (1, 2, 3), 2, "pre_norm", {"keys.0": 0}))
    for changed in (
        {"more": 1}, {"tokens": [1, "2"]}, {"tokens": []}, {"tokens": [10**9] * 3},
        {"tokens": [1] * 600}, {"tokens": [True, 1, 1]}, {"step_size": 0}, {"wanted": {}},
        {"wanted": {"keys.0": 3}}, {"wanted": {"keys.9": 0}}, {"wanted": {"../x": 0}},
        {"capture": "latent"}, {"model": "x"}, None, {},
    ):  # fmt: skip
        changed = changed and {**good, **changed}
        request = urllib.request.Request(
            f"http://{server.address}/v1/prefill", json.dumps(changed).encode()
        )
        with pytest.raises(urllib.error.HTTPError) as found:
            urllib.request.urlopen(request, timeout=10)
        error = json.loads(found.value.read())["error"]["message"]
        assert found.value.code in (400, 409) and "\n" not in error and error
    assert kv.connect(server.address)
