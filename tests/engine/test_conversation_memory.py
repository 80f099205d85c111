"""Lines that are put away and come back, what they weigh, and conversations on disk."""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.engine import storage
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.threads import finished
from tests.support import TESTS, tiny
from tests.support.identity import identity_of
from tests.support.processes import WITHOUT_TORCH
from tests.support.talks import NEW, ask, expected, talk_of

FAMILIES = ("qwen3", "gemma3", "gemma4", "deepseek_v3", "converted_mla")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    root = tmp_path_factory.mktemp("memory")
    rows = {name: tiny.FAMILIES[name] for name in FAMILIES}
    return {n: kv.load(tiny.write_tiny_model(root / n, t, **o)) for n, (t, o) in rows.items()}


def held(talk: Conversation, name: str) -> list[np.ndarray]:
    """Copies of all that a line's caches hold, used part alone."""
    return [
        np.array(array.astype(mx.float32))
        for cache in talk.lines[name].cache
        for array in cache.keys_and_values()
    ]


# ---- away -----------------------------------------------------------------------------------


@pytest.fixture
def alone() -> None:
    """Conversations of other tests are gone, and their files with them."""
    gc.collect()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_line_on_disk_comes_back_bit_by_bit(
    models: dict[str, LanguageModel], family: str
) -> None:
    talk = talk_of(models[family], verbatim=True)
    ask(talk, "a", "the use of an other is it on? " * 2)
    ask(talk, "b", "is it on?")
    before = held(talk, "a")
    assert talk.offload("a", "disk") > 0
    (file,) = storage._folder().iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert talk.lines["a"].where == "disk" and talk.lines["a"].cache_bytes == 0
    for ours, theirs in zip(held(talk, "a"), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert talk.lines["a"].where == "resident" and not list(storage._folder().iterdir())
    talk.offload("a", "disk")
    ask(talk, "a", "and you")  # its own answer, from the line that came back and grew


def test_eight_bits_round_once_to_half_a_step(models: dict[str, LanguageModel]) -> None:
    talk = talk_of(models["qwen3"])
    ask(talk, "a", "the use of an other is it on?")
    before = held(talk, "a")
    freed = talk.offload("a")
    assert talk.lines["a"].where == "8bit"
    # A byte a number and a float a group of 64, in place of four bytes a number.
    assert talk.lines["a"].cache_bytes == pytest.approx(freed / (4 / (1 + 4 / 64) - 1), rel=1e-6)
    for ours, theirs in zip(held(talk, "a"), before, strict=True):
        half = np.abs(theirs).max() / 127 / 2  # of the largest step there is
        assert 0 < np.abs(ours - theirs).max() <= 1.001 * half
    again = held(talk, "a")
    for _ in range(3):
        talk.offload("a")
        for ours, theirs in zip(held(talk, "a"), again, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)  # rounded only once


@pytest.mark.usefixtures("alone")
def test_a_damaged_file_is_found_and_the_line_read_anew(models: dict[str, LanguageModel]) -> None:
    talk = talk_of(models["qwen3"], verbatim=True)
    ask(talk, "a", "the use of an other")
    ask(talk, "b", "is it on?")
    talk.offload("a", "disk")
    (file,) = storage._folder().iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    said = talk.messages
    with pytest.raises(kv.KVLingoError, match="the line of a is lost .*sha256.*ask again"):
        talk.reply("a", "and you")
    assert talk.messages == said and talk.lines["a"].where == "empty"
    ask(talk, "a", "and you")
    talk.offload("b", "disk")
    talk.lines["b"]._away.paths[0].unlink()
    with pytest.raises(kv.KVLingoError, match="the line of b is lost .*cannot be read"):
        talk.reply("b", "and you")
    ask(talk, "b", "and you")


@pytest.mark.usefixtures("alone")
def test_a_disk_that_cannot_be_written_costs_nothing(
    models: dict[str, LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    talk = talk_of(models["qwen3"])
    ask(talk, "a", "the use of an other")
    monkeypatch.setattr(storage, "write_tensors", full)
    with pytest.raises(OSError, match="cannot be kept on disk .No space left.* stays in memory"):
        talk.offload("a", "disk")
    assert talk.lines["a"].where == "resident" and not list(storage._folder().iterdir())
    ask(talk, "a", "and you")
    with pytest.raises(ValueError, match="where is 'tape'; it must be one of 8bit, disk"):
        talk.offload("a", "tape")
    with pytest.raises(ValueError, match="offload is 'tape'; it must be one of None, 8bit, disk"):
        talk_of(models["qwen3"], offload="tape")


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                           capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    root = tmp_path / "offload"
    for name in (f"{ended}-left", f"{os.getpid()}-ours"):
        (root / name).mkdir(parents=True)
        (root / name / "x.safetensors").write_bytes(b"x")
    script = "from kvlingo_mlx.engine.storage import _folder; print(_folder())"
    env = {**os.environ, "KVLINGO_HOME": str(tmp_path)}
    made = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True,
                          check=True).stdout.strip()  # fmt: skip
    assert [path.name for path in root.iterdir()] == [f"{os.getpid()}-ours"]
    assert Path(made).parent == root  # and its own went when it ended


# ---- memory ---------------------------------------------------------------------------------

MEMORY = """
import json, os, sys
from kvlingo_mlx.backend import mx
import kvlingo_mlx as kv
import kvlingo_mlx.engine.conversation
from kvlingo_mlx.embedded import zoo

def active():
    import gc; gc.collect()
    mx.synchronize(); mx.clear_cache()
    return mx.get_active_memory()

def measure(kind, names):
    models = [kv.load(zoo(n) if "/" not in n else n) for n in names]
    pair = {"s": models[0], "l": models[1]}
    talk = kv.Conversation(pair, enable_thinking=False)
    found = []
    text = "The key of Anna is B4. " * 60
    for name in "sl":
        talk.reply(name, text, max_tokens=8)
        stats = talk.stats()
        found.append([stats.total, stats.mlx_active, active()])
    for where in ("8bit", "disk"):
        before = active()
        said = talk.offload("s" if where == "8bit" else "l", where)
        found.append([said, before - active()])
    return found

kinds = json.loads(sys.argv[1])
for kind, names in kinds.items():
    if len(kinds) == 1 or os.fork() == 0:  # before MLX computes
        print(json.dumps([kind, measure(kind, names)]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[float]]]:
    """By kind, each in a process of its own, where nothing else holds arrays."""
    root = TESTS / "zoo" / "models"
    qwen3 = ["tiny-qwen3-s", "tiny-qwen3-l"]
    gemma3 = [str(root / f"tiny-gemma3-{size}") for size in "sl"]
    kinds = {"qwen3": qwen3, "gemma3": gemma3}
    # One process starts the others where a GPU's library does not forbid that; it saves seconds.
    forks = platform.system() == "Linux"
    lines = []
    for some in [kinds] if forks else [{kind: names} for kind, names in kinds.items()]:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH + MEMORY, json.dumps(some)],
            env={**os.environ, "KVLINGO_HOME": str(root.parent)}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines += done.stdout.splitlines()
    return dict(map(json.loads, lines))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_stats_agree_with_mlx(measured: dict[str, list[list[float]]], kind: str) -> None:
    first, second, *offloads = measured[kind]
    for total, reported, active in (first, second):
        assert total == pytest.approx(reported, rel=0.05)
        assert total == pytest.approx(active, rel=0.05)
    for said, freed in offloads:
        assert said > 100_000 and freed == pytest.approx(said, rel=0.05)


def test_measure_reprefill(models: dict[str, LanguageModel]) -> None:
    talk = talk_of(models["qwen3"])
    with pytest.raises(ValueError, match="no model has answered yet"):
        talk.measure_reprefill()
    ask(talk, "a", "the use of an other")
    before = held(talk, "a")
    assert talk.measure_reprefill() > 0
    for ours, theirs in zip(held(talk, "a"), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


# ---- at the same time -----------------------------------------------------------------------


def test_stats_tell_what_a_branch_shares(models: dict[str, LanguageModel]) -> None:
    """Against what MLX says: a branch takes nothing, its first answer what was shared."""

    def shared(talk: Conversation) -> dict[str, int]:
        return {line.name: line.shared_bytes for line in talk.stats().lines}

    talk, apart = (talk_of(models["qwen3"], eager=False) for _ in range(2))
    for each in (talk, apart):
        ask(each, "a", "the use of an other")
        ask(each, "b", "is it on?")
    assert shared(talk) == {"a": 0, "b": 0}  # equal numbers elsewhere are not shared
    gc.collect()  # what earlier tests left would be freed meanwhile
    before = mx.get_active_memory()
    branch = talk.branch()
    held = {line.name: line.cache_bytes for line in talk.stats().lines}
    assert shared(talk) == shared(branch) == held and min(held.values()) > 0
    assert mx.get_active_memory() - before < min(held.values()) / 2
    branch.reply("a", "and you", max_tokens=2)
    assert shared(talk) == shared(branch) == {"a": 0, "b": held["b"]}
    assert mx.get_active_memory() - before >= held["a"]
    del branch
    assert shared(talk) == {"a": 0, "b": 0}


def test_branches_of_a_line_that_is_still_being_written_are_apart(
    models: dict[str, LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    real = storage.write_file

    def slow(*arguments: Any) -> str:
        assert go.wait(600)
        return real(*arguments)

    monkeypatch.setattr(storage, "write_file", slow)
    talk = talk_of(models["qwen3"], offload="disk", eager=False, verbatim=True)
    ask(talk, "a", "the use of an other")
    ask(talk, "b", "is it on?")
    other = talk.branch()
    assert talk.lines["a"].away and talk.lines["a"].where == "resident"
    talk.undo()
    talk.undo()
    ask(talk, "a", "and you")
    go.set()
    ask(other, "a", "hi there")
    ask(talk, "b", "hi there")
    held_by_other = held(other, "a")
    fresh = talk_of(models["qwen3"], eager=False, verbatim=True)
    finished(fresh.exchange.bring("a", other.lines["a"].tokens))
    for ours, theirs in zip(held_by_other, held(fresh, "a"), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_nothing_changes_a_conversation_whose_answer_is_open(
    models: dict[str, LanguageModel], tmp_path: Path
) -> None:
    talk = talk_of(models["qwen3"])
    ask(talk, "a", "hi there")
    saved = talk.save(tmp_path / "talk")
    before = (saved / "conversation.json").read_bytes()
    answer = talk.stream_reply("a", "is it on?", max_tokens=NEW)
    next(answer)
    for change in (talk.undo, talk.branch, lambda: talk.offload("a"), talk.measure_reprefill,
                   lambda: talk.save(saved), lambda: talk.reply("b", "x"), talk.close):  # fmt: skip
        with pytest.raises(ValueError, match="an answer is still being written"):
            change()
    assert (saved / "conversation.json").read_bytes() == before
    list(answer)
    ask(talk, "b", "and you")


def test_a_translation_ahead_that_fails_leaves_the_answer(
    models: dict[str, LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = talk_of(models["qwen3"], verbatim=True)
    with monkeypatch.context() as patch:
        patch.setattr(type(talk.exchange), "follow", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.warns(UserWarning, match="the other lines could not follow"):
            ask(talk, "a", "the use of an other")
    assert len(talk.messages) == 2
    ask(talk, "b", "is it on?")


# ---- interrupted ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_switch_that_is_interrupted_changes_nothing(
    models: dict[str, LanguageModel], family: str, error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    talk = talk_of(models[family], eager=False, verbatim=True)
    ask(talk, "a", "the use of an other is it on? " * 2)
    said, tokens = talk.messages, list(talk.transcript.tokens)
    real, calls = caches.append, []

    def append(cache: Any, states: Any, model: Any) -> None:
        real(cache, states, model)
        calls.append(1)
        if len(calls) == 2:  # in the middle of the translation
            cache[0].offset += 1
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(caches, "append", append)
        with pytest.raises(error):
            talk.reply("b", "is it on?")
    assert len(calls) == 2 and (talk.messages, talk.transcript.tokens) == (said, tokens)
    ask(talk, "b", "is it on?")
    ask(talk, "a", "and you")


def test_ctrl_c_while_decoding_changes_nothing(models: dict[str, LanguageModel]) -> None:
    talk = talk_of(models["qwen3"])
    ask(talk, "a", "the use of an other")
    said = talk.messages
    answer = talk.stream_reply("b", "is it on?", max_tokens=NEW)
    next(answer)
    with pytest.raises(KeyboardInterrupt):
        answer.throw(KeyboardInterrupt)
    assert talk.messages == said
    ask(talk, "b", "is it on?")


# ---- windows --------------------------------------------------------------------------------


@pytest.mark.parametrize("verbatim", [True, False])
@pytest.mark.parametrize("eager", [True, False])
def test_full_windows_are_taken_up_at_the_last_message(
    models: dict[str, LanguageModel], eager: bool, verbatim: bool
) -> None:
    """Rings cannot be trimmed once they are full: without marks all would be read again."""
    talk = talk_of(models["gemma3"], eager=eager, verbatim=verbatim, enable_thinking=False)
    ask(talk, "a", "the use of an other is it on? " * 3)
    ask(talk, "b", "is it on?")
    rings = [cache for cache in talk.lines["b"].cache if caches.is_ring(cache)]
    assert rings and not any(ring.is_trimmable() for ring in rings)
    begin = models["gemma3"].tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokens = talk.transcript.tokens
    header = max(index for index, token in enumerate(tokens) if token == begin)  # the answer's
    assert header > len(tokens) - NEW - 20
    ask(talk, "b", "and you")
    assert talk.last_switch is not None and talk.last_switch.kept >= header
    talk.undo()
    ask(talk, "b", "hi there")  # edited
    assert talk.last_switch.kept >= header
    talk.undo()
    ask(talk, "b", "hi there")  # once more
    assert talk.last_switch.kept >= header
    if eager:
        ask(talk, "a", "and you")
        assert talk.last_switch.kept + talk.last_switch.ahead >= header


# ---- tools ----------------------------------------------------------------------------------


def test_tools_and_their_results(models: dict[str, LanguageModel]) -> None:
    tools = [{"type": "function", "function": {"name": "on", "parameters": {}}}]
    model = models["qwen3"]
    talk = talk_of(model, tools=tools)
    turns: list[dict[str, str]] = []
    for name, new in (
        ("a", [{"role": "user", "content": "is it on?"}]),
        ("b", [{"role": "tool", "content": "on"}]),
        ("a", [{"role": "tool", "content": "off"}, {"role": "user", "content": "and you"}]),
    ):
        turns += new
        text = talk.reply(name, new, max_tokens=NEW)
        whole = model.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False, tools=tools
        )
        prompt = talk.transcript.undo().prompt(model, new)
        assert model.tokenizer.decode(prompt) == whole
        assert talk.transcript.tokens[len(prompt) :] == expected(model, prompt)
        turns.append({"role": "assistant", "content": text})
        assert talk.messages == turns


# ---- on disk --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_conversation_goes_on_as_it_would_have(
    models: dict[str, LanguageModel], family: str, tmp_path: Path
) -> None:
    model, eager = models[family], family in FAMILIES[::2]
    talk = talk_of(model, eager=eager, verbatim=family == "qwen3", system="hi")
    ask(talk, "a", "the use of an other is it on? " * 2)
    ask(talk, "b", "is it on?")
    folder = talk.save(tmp_path / "talk")
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}
    translator = identity_of(model, capture=model.family.points[0])
    back = Conversation.resume(folder, {"a": model, "b": model}, [translator], eager=eager,
                               prefill_step_size=7)  # fmt: skip
    assert back.messages == talk.messages and back.transcript.tokens == talk.transcript.tokens
    for name in "ab":
        assert back.lines[name].spans == talk.lines[name].spans
        assert back.lines[name].native.facts() == talk.lines[name].native.facts()
        for ours, theirs in zip(held(back, name), held(talk, name), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    ask(back, "a", "and you")
    assert back.last_switch is not None
    ask(talk, "a", "and you")
    assert talk.last_switch is not None
    for field in ("kept", "translated", "read"):
        assert getattr(back.last_switch, field) == getattr(talk.last_switch, field)
    back.undo()
    back.undo()
    ask(back, "b", "hi there")
    again = back.save(folder)  # over the old one
    assert len(list(again.iterdir())) <= 1 + 2 * 2
    assert Conversation.resume(folder, {"a": model, "b": model}, [translator]).messages == (
        back.messages
    )


def test_another_model_or_translator_is_refused(
    models: dict[str, LanguageModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLINGO_HOME", str(tmp_path))
    model = models["qwen3"]
    talk = talk_of(model)
    ask(talk, "a", "the use of an other")
    folder = talk.save(tmp_path / "talk")
    good = identity_of(model, capture="pre_norm")
    type_name, options = tiny.FAMILIES["qwen3"]
    other = kv.load(tiny.write_tiny_model(tmp_path / "other", type_name, **{**options, "seed": 9}))
    assert other.spec().fingerprint != model.spec().fingerprint
    with pytest.raises(ValueError, match="held with another model 'b' .*fingerprint differs"):
        Conversation.resume(folder, {"a": model, "b": other}, [good])
    tuned = kv.load(tiny.write_tiny_model(tmp_path / "tuned", type_name, **options))
    assert tuned.spec().fingerprint == model.spec().fingerprint
    Conversation.resume(folder, {"a": model, "b": tuned}, [good])
    middle = tuned.model.layers[1]
    assert middle is not tuned.model.layers[-1]
    for module in (middle.self_attn.q_proj, middle.mlp.down_proj, tuned.model.model.embed_tokens):
        before = module.weight
        module.weight = 1.01 * before  # norms as they were
        with pytest.raises(ValueError, match="held with another model 'b' .*weights differs"):
            Conversation.resume(folder, {"a": model, "b": tuned}, [good])
        module.weight = before
    with pytest.raises(ValueError, match="system is what the saved conversation has; give it"):
        Conversation.resume(folder, {"a": model, "b": model}, [good], system="x")
    with pytest.raises(ValueError, match="needs a model 'b' .*; there are a$"):
        Conversation.resume(folder, {"a": model}, [good])
    with pytest.raises(kv.IncompatibleTranslatorError, match="from a to b .*none is given"):
        Conversation.resume(folder, {"a": model, "b": model})
    both = {"a": model, "b": model}
    alone = Conversation.resume(folder, both, on_missing="reprefill")
    ask(alone, "b", "is it on?")  # its cache holds what was translated; the rest it reads
    worse = identity_of(model, capture="post_norm")
    needed = f"from a to b .*sha256 {good.digest[:12]}.*other weights"
    with pytest.raises(kv.IncompatibleTranslatorError, match=needed):
        Conversation.resume(folder, both, [worse])
    joined = Conversation.resume(folder, {"a": model, "b": model, "c": model}, [good])
    ask(joined, "c", "is it on?")  # one more may join


def test_a_damaged_folder_is_refused(models: dict[str, LanguageModel], tmp_path: Path) -> None:
    model = models["qwen3"]
    talk = talk_of(model)
    ask(talk, "a", "the use of an other")
    folder = talk.save(tmp_path / "talk")
    resume = lambda: Conversation.resume(  # noqa: E731
        folder, {"a": model, "b": model}, [identity_of(model, capture="pre_norm")]
    )
    resume()
    facts = json.loads((folder / "conversation.json").read_text())

    def refused(change: Any, message: str) -> None:
        changed = json.loads(json.dumps(facts))
        change(changed)
        (folder / "conversation.json").write_text(json.dumps(changed))
        with pytest.raises(kv.MalformedConversationError, match=message):
            resume()
        (folder / "conversation.json").write_text(json.dumps(facts))

    refused(lambda f: f.update(version=2), "is of format version 2; this version reads 3")
    refused(lambda f: f.update(format="x"), "it is no kvlingo-conversation")
    refused(lambda f: f.pop("lines"), "KeyError: 'lines'")
    refused(lambda f: f["lines"]["a"]["facts"]["tokens"].pop(), "tokens, but caches of")
    refused(lambda f: f["lines"]["a"]["facts"]["caches"][0].update(offset=999), "holds 256 tokens")
    refused(lambda f: f["lines"]["a"]["files"]["cache"].update(file="../x"), "names a file")
    refused(lambda f: f["lines"]["a"]["files"]["cache"]["shapes"].popitem(), "KeyError")
    refused(lambda f: f["transcript"].pop("states"), "KeyError: 'states'")
    (file,) = folder.glob("line-0.cache.*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(kv.MalformedConversationError, match="is damaged: its sha256 is"):
        resume()
    file.unlink()
    with pytest.raises(kv.MalformedConversationError, match="cannot be read"):
        resume()
    (folder / "conversation.json").write_text("{")
    with pytest.raises(kv.MalformedConversationError, match="conversation.json: "):
        resume()
    with pytest.raises(kv.MalformedConversationError, match="is no saved conversation"):
        Conversation.resume(tmp_path / "nowhere", {"a": model})


def test_an_interrupted_save_leaves_the_old_conversation(
    models: dict[str, LanguageModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["qwen3"]
    translator = identity_of(model, capture="pre_norm")
    talk = talk_of(model)
    ask(talk, "a", "the use of an other")
    folder = talk.save(tmp_path / "talk")
    said = talk.messages
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    ask(talk, "b", "is it on?")
    real, left = os.replace, [0]

    def replace(*paths: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        real(*paths)

    monkeypatch.setattr(os, "replace", replace)
    for at in (1, 2, 3):  # the first line's file, the second one's, the facts
        left[0] = at
        with pytest.raises(KeyboardInterrupt):
            talk.save(folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        left[0] = at
        with pytest.raises(KeyboardInterrupt):
            talk.save(tmp_path / "new")
        assert not (tmp_path / "new").exists()
    monkeypatch.setattr(os, "replace", real)
    models_ = {"a": model, "b": model}
    assert Conversation.resume(folder, models_, [translator]).messages == said
    talk.save(folder)
    assert Conversation.resume(folder, models_, [translator]).messages == talk.messages
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".DS_Store").write_text("x")
    talk.save(tmp_path / "mine")  # what a file manager leaves is nobody's
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match="exists and is not a saved conversation"):
        talk.save(tmp_path / "mine")
    with pytest.raises(ValueError, match="is a file; name a folder"):
        talk.save(tmp_path / "mine" / "notes.txt")
