"""What a server keeps of its conversations, on disk and of the models they need."""

import shutil
import threading
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import pytest

from kvlingo_mlx.engine import folder
from kvlingo_mlx.serving import active_request, session_store
from kvlingo_mlx.serving.messages import GenerationRequest, Progress
from tests.support.engines import Clients, asked, said, user, zoo_clients
from tests.support.fixtures import Logged, Patch

HISTORY = [user("Anna lives in Rome. " * 20)]


def clients_of(tmp_path: Path, **facts: Any) -> Clients:
    return zoo_clients(tmp_path, ("large", "moe"), **{"stop_timeout": 0.1, **facts})


def weights_here() -> int:
    mx.clear_cache()
    return mx.get_active_memory()


def test_saving_brings_no_weights_into_memory(tmp_path: Path) -> None:
    """What says which model a conversation was held with is found once, while it is loaded."""
    clients = clients_of(tmp_path)
    engine = clients.engine
    clients.one("large", HISTORY)
    (session,) = engine.store.sessions
    smallest = min(each.weights for each in engine.pool.all.values())
    before = weights_here()
    assert engine.store.save(session)  # moe has never been read
    assert weights_here() < before + smallest / 10
    engine.unload("large")
    assert weights_here() < before - smallest / 2  # negative control: weights can be seen here
    session.saved, before = None, weights_here()
    assert engine.store.save(session)
    assert weights_here() < before + smallest / 10


def test_keys_that_were_not_written_whole_go(tmp_path: Path) -> None:
    """The process was killed while it wrote them."""
    clients = clients_of(tmp_path)
    told = clients.one("large", HISTORY)
    clients.engine.close()
    whole = {path.name for path in (tmp_path / "kept").iterdir()}
    (tmp_path / "kept" / "0123.tmp").write_text("{")
    (tmp_path / "kept" / "0123").mkdir()
    again = clients_of(tmp_path)
    whole |= {".conversations.lock"}
    assert {path.name for path in (tmp_path / "kept").iterdir()} == whole and len(whole) == 3
    history = [*HISTORY, said(told.text), user("Where?")]
    assert again.one("large", history).usage.cached_tokens > 0


def test_an_idle_conversation_is_written_while_it_goes_on(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Writing takes long; what is on disk is the conversation as it was when it began."""
    monkeypatch.setattr(session_store, "IDLE_S", 0.0)
    clients, begun, on = clients_of(tmp_path), threading.Event(), threading.Event()
    write = folder.write_file

    def slowly(*given: Any) -> str:
        begun.set()
        assert on.wait(60)
        return write(*given)

    monkeypatch.setattr(folder, "write_file", slowly)
    told = clients.one("large", HISTORY)
    store = clients.engine.store
    (session,) = store.sessions
    store.tidy()
    written = session.saved
    assert begun.wait(60) and session.folder is None
    more = [*HISTORY, said(told.text), HISTORY[0]]
    second = clients.one("large", more)  # does not wait
    assert second.usage.cached_tokens > 0 and session.folder is None
    store.tidy()  # one at a time
    on.set()
    assert written is not None
    written.result(60)
    shutil.copytree(tmp_path / "kept", tmp_path / "crashed")
    again = clients_of(tmp_path, conversations=str(tmp_path / "crashed"))
    found = again.one("large", more)
    assert found.text == second.text
    assert found.usage.cached_tokens == second.usage.cached_tokens


def test_what_cannot_be_written_is_told_and_not_lost(
    tmp_path: Path, monkeypatch: Patch, caplog: Logged
) -> None:
    def full(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session_store, "IDLE_S", 0.0)
    clients = clients_of(tmp_path)
    clients.one("large", HISTORY)
    store = clients.engine.store
    (session,) = store.sessions
    with monkeypatch.context() as patched:
        patched.setattr(folder, "write_file", full)
        for _ in range(3):
            store.tidy()
            assert session.saved is not None and session.saved.exception(60) is not None
        assert caplog.text.count("cannot be kept on disk") == 1  # it is tried once
        assert [path.name for path in (tmp_path / "kept").iterdir()] == [".conversations.lock"]
    store.budget = 1
    store.make_room()  # there is space again
    store.budget = 10**12
    assert session.conversation is None and session.folder is not None
    assert clients.one("large", HISTORY).usage.read_tokens == 1


def test_a_folder_is_of_one_server_at_a_time(tmp_path: Path) -> None:
    """One that is started at once waits for the last one, which may still save."""
    first = clients_of(tmp_path).engine
    with pytest.raises(ValueError, match="another server keeps its conversations in"):
        clients_of(tmp_path)
    timer = threading.Timer(0.5, first.store.close)
    timer.start()
    clients_of(tmp_path, stop_timeout=30.0)
    timer.join()


def test_who_waits_is_told_how_much_is_read(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(active_request, "PROGRESS_S", 0.0)
    clients = clients_of(tmp_path, prefill_step_size=16)
    text = GenerationRequest("large", prompt="Anna lives in Rome. " * 20, max_tokens=2)
    for ask in (asked("large", HISTORY, max_tokens=2), text):
        (told,) = clients.together([ask])
        waited = [event for event in told.events if isinstance(event, Progress) and event.total]
        assert {each.total for each in waited} == {told.usage.prompt_tokens}
        done = [each.done for each in waited]
        assert len(done) > 3 and done == sorted(set(done)) and done[-1] <= waited[0].total


def test_requests_wait_until_there_is_room_for_their_lines(tmp_path: Path) -> None:
    clients = clients_of(tmp_path)
    asks = [asked("large", [user(f"{n} lives. " * 60)]) for n in range(6)]
    alone = [clients.together([ask])[0].text for ask in asks]
    one = max(session.nbytes for session in clients.engine.store.sessions)
    clients.engine.close()
    clients = clients_of(tmp_path, conversations=str(tmp_path / "others"))
    store = clients.engine.store
    clients.one("large", HISTORY, max_tokens=2)
    store.budget = store.used + int(2.5 * one)
    told = [clients.send(ask)[1] for ask in asks]
    most = 0
    while clients.engine.busy:
        clients.engine.work()
        most = max(most, store.used)
    assert [each.text for each in told] == alone
    assert most < store.budget + one  # the length of a prompt in tokens is a guess


def test_a_model_without_room_is_not_kept_waiting_for_ever(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Others ask for the one in memory again and again."""
    monkeypatch.setattr(session_store, "PATIENCE_S", 0.0)
    clients = clients_of(tmp_path)
    engine = clients.engine
    clients.one("large", HISTORY, max_tokens=2)
    engine.store.budget = engine.store.used + engine.pool["moe"].weights // 2
    others = [clients.send(asked("large", [user("0")]))[1]]
    _, waiting = clients.send(asked("moe", [user("Anna?")]))
    for number in range(1, 40):
        question = [user(str(number))]
        others.append(clients.send(asked("large", question))[1])
        while engine.busy and not any(told.events for told in others[-2:]):
            engine.work()
        if waiting.begun:
            break
    assert waiting.begun
    clients.work()
    assert waiting.text and all(told.text for told in others)


def test_a_long_load_gives_signs_of_life(tmp_path: Path) -> None:
    """Else it would be taken for hung."""
    engine = clients_of(tmp_path).engine
    before, sizes = weights_here(), list[float]()

    def told() -> None:
        sizes.append((weights_here() - before) / engine.pool["large"].weights)

    engine.pool.between = told
    engine.load("large")
    assert len(sizes) > 20 and sizes[0] < 0.2 and sizes[-1] > 0.9
    assert sum(0.3 < size < 0.7 for size in sizes) > 5  # while it goes on, not at the end
