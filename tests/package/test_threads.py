"""Several threads on shared models: the answers of one thread, whoever else is at work."""

# ruff: noqa: B023  (threads end before a loop goes on)

import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import mlx_lm
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx import threads
from kvlingo_mlx.caches import memory
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import ROOT, tiny
from tests.support.fixtures import Models, Patch
from tests.support.identity import identity_of

sys.path.insert(0, str(ROOT / "benchmarks"))
import thread_stress

from tests.support.processes import WITHOUT_TORCH
from tests.support.talks import talk_of

NEW = 6


def together(*actions: Callable[[], Any]) -> list[Any]:
    """What actions return that begin at once, in threads of their own."""
    start = threading.Barrier(len(actions))

    def begin(action: Callable[[], Any]) -> Any:
        start.wait()
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return [job.result(timeout=120) for job in [pool.submit(begin, a) for a in actions]]


def replies(model: LanguageModel) -> list[str]:
    with talk_of(model) as talk:
        said = zip("abab", ("the use of an other", "is it on?", "and you", "hi there"), strict=True)
        return [talk.reply(name, message, max_tokens=NEW) for name, message in said]


def plain(model: LanguageModel) -> list[str]:
    ids = model.tokenizer.encode("the use of an other, is it on?")
    return [mlx_lm.generate(model.model, model.tokenizer, ids, max_tokens=NEW) for _ in range(4)]


def test_chance_in_threads(families: Models, tmp_path: Path) -> None:
    """A short form of benchmarks/thread_stress.py."""
    lists = [thread_stress.drawn(seed, 5, "ab") for seed in range(6)]
    assert {kind for todo in lists for kind, *_ in todo} == set(thread_stress.KINDS)

    def user(way: str, index: int) -> list[str]:
        model = families[("qwen3", "gemma3", "qwen3_moe")[index % 3]]
        both = dict.fromkeys("ab", model)
        translators = [identity_of(model, capture=model.family.points[0])]
        who = thread_stress.User(both, translators, tmp_path / f"{way}{index}", new=NEW, longest=99)
        return thread_stress.used(who, lists[index])

    alone = [user("alone", index) for index in range(len(lists))]
    assert not [answer for heard in alone for answer in heard if "Error: " in answer]
    beside = together(*[lambda i=i: user("beside", i) for i in range(len(lists))])
    assert beside == alone


def test_what_one_thread_begins_another_goes_on_with(families: Models, tmp_path: Path) -> None:
    for model, eager in itertools.product((families["qwen3"], families["gemma3"]), (True, False)):
        talk = talk_of(model, eager=eager)
        talk.reply("a", "hi there", max_tokens=NEW)
        saved = talk.save(tmp_path / f"{model.path.name}-{eager}")
        both, own = dict.fromkeys("ab", model), list(talk.exchange.directions.loaded.values())
        given = own or [identity_of(model, capture=model.family.points[0])]
        taken = {
            "branched": talk.branch,
            "resumed": lambda: Conversation.resume(saved, both, given, prefill_step_size=7),
        }
        for name in "ab":
            expected = talk.branch().reply(name, "and you", max_tokens=NEW)
            for made in taken.values():
                here = made()
                assert together(lambda: here.reply(name, "and you", max_tokens=NEW)) == [expected]
                (there,) = together(made)
                assert there.reply(name, "and you", max_tokens=NEW) == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # mlx-lm's own
def test_an_answer_stays_in_its_thread(families: Models) -> None:
    """mlx-lm's loop holds a stream of the thread that began it."""
    model, talk = families["gemma3"], talk_of(families["gemma3"])
    options = {"translator": identity_of(model), "max_tokens": NEW, "prefill_step_size": 7}
    expected = replies(model)[0]
    for made in (
        kv.stream_generate(model, model, "the use of an other", **options),
        talk.stream_reply("a", "the use of an other", max_tokens=NEW),
    ):
        assert together(lambda: next(made).token)
        with pytest.raises(kv.KVLingoError, match="begun in another thread"):
            next(made)
    left = talk.stream_reply("a", "is it on?", max_tokens=NEW)
    together(lambda: next(left))
    left.close()
    talk.undo() if talk.messages else None
    assert talk.reply("a", "the use of an other", max_tokens=NEW) == expected


def test_weights_that_one_thread_opened_another_reads(families: Models, tmp_path: Path) -> None:
    model = families["qwen3"]
    options = {"translator": identity_of(model), "max_tokens": NEW}
    expected = kv.generate(model, model, "hi there", **options)
    for lazy in (True, False):
        opened = kv.load(model.path, lazy=lazy)
        got = together(*[lambda: kv.generate(opened, opened, "hi there", **options)] * 3)
        assert got == [expected] * 3
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    folder = tiny.write_tiny_model(
        tmp_path / "rotated", "llama", seed=1, layers=2, kv_heads=2, head_dim=32,
        rope_scaling=scaling,
    )  # fmt: skip
    rotated = kv.load(folder)  # its frequencies are computed when it is made, and no parameter
    expected = plain(kv.load(folder))
    assert together(lambda: plain(rotated)) == [expected]


def test_a_second_thread_is_refused_and_an_ended_answer_lets_go(families: Models) -> None:
    talk = talk_of(families["qwen3"])
    inside, go_on = threading.Event(), threading.Event()

    def sampler(logprobs: mx.array) -> mx.array:
        inside.set()
        assert go_on.wait(60)
        return mx.argmax(logprobs, axis=-1)

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(talk.reply, "a", "hi there", max_tokens=2, sampler=sampler)
        assert inside.wait(60)
        for change in (talk.undo, talk.branch, lambda: talk.reply("b", "is it on?")):
            with pytest.raises(ValueError, match="an answer is still being written"):
                change()
        go_on.set()
        job.result(timeout=60)
    assert talk.reply("b", "is it on?", max_tokens=2) is not None


def test_interruptions_leave_nothing_behind(families: Models) -> None:
    """In a prefill, in a decoding step, by leaving an answer: lock free, classes back."""
    model = families["qwen3"]
    classes = [type(module) for module in model.model.modules()]
    expected = replies(model)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt  # which passes by what looks for exceptions alone

    def check() -> None:
        gc.collect()
        assert [type(module) for module in model.model.modules()] == classes
        assert together(lambda: replies(model)) == [expected]  # and so the lock is free

    for at in ("__call__", "sampler"):
        talk = talk_of(model)
        with pytest.MonkeyPatch.context() as patch:
            if at == "__call__":
                patch.setattr(type(model.attentions[1]), at, interrupt)
            with pytest.raises(KeyboardInterrupt):
                sampler = interrupt if at == "sampler" else None
                talk.reply("a", "hi there", max_tokens=NEW, sampler=sampler)
        check()
        assert [talk.reply(n, m, max_tokens=NEW) for n, m in zip(
            "abab", ("the use of an other", "is it on?", "and you", "hi there"), strict=True
        )] == expected  # fmt: skip
    left = talk_of(model).stream_reply("a", "hi there", max_tokens=NEW)
    next(left)
    check()  # while it waits
    left.close()
    check()


def test_a_loop_of_short_units_keeps_nobody_out() -> None:
    order: list[str] = []
    inside = threading.Event()

    def loop() -> None:
        for _ in range(200):
            with threads.working():
                order.append("loop")
                inside.set()
                time.sleep(0.001)  # lets go of the interpreter, as MLX does

    def once() -> None:
        inside.wait(60)
        with threads.working():
            order.append("once")

    together(loop, once)
    assert order.count("once") == 1 and order[-1] == "loop"


def test_the_wired_limit_changes_once(families: Models, monkeypatch: Patch) -> None:
    """On Metal it must not change while anything is computed."""
    import contextlib

    calls: list[str] = []

    @contextlib.contextmanager
    def limit(*_: Any) -> Any:
        calls.append("up")
        yield
        calls.append("down")

    monkeypatch.setattr(threads, "wired_limit", limit)
    gc.collect()
    model = families["qwen3"]
    options = {"translator": identity_of(model), "max_tokens": NEW}
    first, second = (kv.stream_generate(model, model, "hi there", **options) for _ in range(2))
    next(first), next(second)
    first.close()
    assert calls == ["up"]
    second.close()
    assert calls == ["up", "down"]


def ended(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process whose products run on two threads, whatever those of the tests run on."""
    script = WITHOUT_TORCH + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "2"},
    )  # fmt: skip


def test_a_process_ends_in_peace(families: Models, tmp_path: Path) -> None:
    """One thread resumed and has ended, another is at work still, an answer was left."""
    talk = Conversation({"s": kv.load("tiny-qwen3-s")})
    talk.reply("s", "The home of Anna is Lima.", max_tokens=2)
    code = """
        import sys, threading
        from concurrent.futures import ThreadPoolExecutor
        import kvlingo_mlx as kv
        from kvlingo_mlx.engine.conversation import Conversation
        def resumed():
            talk = Conversation.resume(sys.argv[1], {"s": model})
            return talk, talk.reply("s", "you", max_tokens=4)
        def work():
            while True:
                begun.set(), resumed()
        model, begun = kv.load("tiny-qwen3-s"), threading.Event()
        left = resumed()[0].stream_reply("s", "hi")
        next(left)
        threading.Thread(target=work, daemon=True).start()
        begun.wait()
        with ThreadPoolExecutor(3) as pool:
            kept = list(pool.map(lambda _: resumed(), range(3)))
    """
    done = ended(code, str(talk.save(tmp_path / "talk")))
    assert (done.returncode, done.stderr) == (0, "")


def limited(monkeypatch: Patch, room: int) -> None:
    monkeypatch.setenv(memory.LIMIT, f"{(mx.get_active_memory() + room) / 1e9:.9f}")


def test_the_memory_limit_holds_for_lines_that_follow(families: Models, monkeypatch: Patch) -> None:
    """An answer is kept where no other line has room to follow it; a switch brings it later."""
    model, long = families["qwen3"], "the use of an other " * 40
    monkeypatch.setenv(memory.LIMIT, "0")
    plain = talk_of(model)
    answer = plain.reply("a", long, max_tokens=NEW)
    each = memory.cache_bytes(model, len(plain.transcript.tokens))
    assert len(plain.lines["b"]) > 0
    gc.collect()
    limited(monkeypatch, int(2.6 * each))  # its own, what is recorded for the other, no third
    talk = talk_of(model)
    with pytest.warns(UserWarning, match="could not follow .*memory"):
        assert talk.reply("a", long, max_tokens=NEW) == answer
    assert len(talk.lines["b"]) == 0 < len(talk.lines["a"])
    monkeypatch.setenv(memory.LIMIT, "0")
    assert talk.reply("b", "and you", max_tokens=NEW) == plain.reply("b", "and you", max_tokens=NEW)


def test_a_closed_conversation_holds_nothing(families: Models, tmp_path: Path) -> None:
    model = families["qwen3"]
    gc.collect()
    before = mx.get_active_memory()
    with talk_of(model) as talk:
        talk.reply("a", "hi there", max_tokens=NEW)
        talk.offload("a", "disk")
        talk.lines["a"]._away._digest.result()  # written, by another thread
        files = set(talk.lines["a"]._away._path.parent.glob("*.safetensors"))
        assert files and mx.get_active_memory() > before
    gc.collect()
    mx.clear_cache()
    assert not {file for file in files if file.exists()}
    assert sum(line.cache_bytes for line in talk.lines.values()) == 0
    talk.close()  # again
    assert len(talk.messages) == 2 and talk.stats().lines[0].where == "empty"
    uses: Sequence[Callable[[], Any]] = (
        lambda: talk.reply("a", "hi"), talk.undo, talk.branch, lambda: talk.save(tmp_path / "talk"),
        lambda: talk.offload("a"), talk.__enter__, talk.measure_reprefill,
    )  # fmt: skip
    for use in uses:
        with pytest.raises(ValueError, match="this conversation is closed"):
            use()
