"""Lines that are put away and come back, what they weigh, and conversations on disk."""

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.engine import folder as folders
from kvlingo_mlx.engine import storage
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.machines import digest_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.threads import finished
from tests.support import TESTS, tiny
from tests.support.fixtures import Models
from tests.support.identity import identity_of
from tests.support.native_caches import entries
from tests.support.opened import cast
from tests.support.talks import NEW, apart, ask, talk_of

FAMILIES = ("qwen3", "gemma3", "gemma4", "deepseek_v3", "converted_mla")
LONG = "the use of an other is it on? " * 2


@pytest.fixture
def files() -> Callable[[], list[Path]]:
    """Files of lines, of this test's conversations alone."""
    gc.collect()
    return lambda: list(storage._folder().iterdir())


def held(talk: Conversation, name: str) -> list[np.ndarray]:
    """Copies of all that a line's caches hold, used part alone."""
    return entries(talk.lines[name].cache)


def equal(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def in_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def resume(folder: Path, model: LanguageModel, **options: Any) -> Conversation:
    same = identity_of(model, capture=model.family.points[0])
    return Conversation.resume(folder, {"a": model, "b": model}, [same], **options)


def written(line: Line) -> dict[str, np.ndarray]:
    """Copies of what a line's caches hold, and its marks."""
    assert line.cache
    held = {name: caches.held(cache)[part] for name, cache, part in line._places()}
    return {name: in_numpy(array) for name, array in held.items()}


@pytest.mark.parametrize("family", [*FAMILIES, "granitemoehybrid in 16 bits"])
def test_lines_on_disk_come_back_bit_by_bit(
    families: Models, family: str, files: Callable[[], list[Path]], tmp_path: Path
) -> None:
    """Marks, too, and states, which are float32 where all else is bfloat16."""
    name, *half = family.split()
    model = cast(families[name], tmp_path / "half", mx.bfloat16) if half else families[name]
    talk = talk_of(model, verbatim=True)
    talk.reply("a", LONG, max_tokens=NEW)
    line = talk.lines["a"]
    kinds = {array.dtype for array in caches.arrays(line.cache)}
    assert kinds == {mx.float32, *([mx.bfloat16] if half else [])}
    before, nbytes = written(line), line.cache_bytes
    assert not half or any(name.startswith("mark") for name in before)
    assert talk.offload("a", "disk") == nbytes > 0 == line.cache_bytes
    assert {file.stat().st_mode & 0o777 for file in files()} == {0o600}
    assert line.where == "disk" and all(not caches.held(cache) for cache in line.resident)
    assert len(line.cache) and line.where == "resident" and not files()
    after = written(line)
    assert after.keys() == before.keys()
    equal(list(after.values()), list(before.values()))
    talk.offload("a", "disk")
    if half:
        talk.undo()
        talk.reply("a", "and you", max_tokens=NEW)
        assert apart(line) < 0.05  # bfloat16, in other chunks
    else:
        ask(talk, "a", "and you")  # its own answer, from the line that came back and grew
    folder = talk.save(tmp_path / "talk")
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    back = resume(folder, model)
    assert back.messages == talk.messages and back.transcript.tokens == talk.transcript.tokens
    for name, line in talk.lines.items():
        assert back.lines[name].tokens == line.tokens and back.lines[name].spans == line.spans
        before, after = written(line), written(back.lines[name])
        assert after.keys() == before.keys()
        equal(list(after.values()), list(before.values()))
        parts = zip(back.lines[name].native.parts, line.native.parts, strict=True)
        for ours, theirs in parts:
            assert (ours.start, ours.end, ours.capture) == (
                theirs.start,
                theirs.end,
                theirs.capture,
            )
            assert list(ours.kept or ()) == list(theirs.kept or ())
            equal(list(map(in_numpy, ours.arrays)), list(map(in_numpy, theirs.arrays)))


def test_eight_bits_round_once_to_half_a_step(model: LanguageModel) -> None:
    talk = talk_of(model)
    ask(talk, "a", "the use of an other is it on?")
    before = held(talk, "a")
    freed = talk.offload("a")
    assert talk.lines["a"].where == "8bit"
    # A byte a number and a float a group of 64, in place of four bytes a number.
    assert talk.lines["a"].cache_bytes == pytest.approx(freed / (4 / (1 + 4 / 64) - 1), rel=1e-6)
    again = held(talk, "a")
    for ours, theirs in zip(again, before, strict=True):
        half = np.abs(theirs).max() / 127 / 2  # of the largest step there is
        assert 0 < np.abs(ours - theirs).max() <= 1.001 * half
    for _ in range(3):
        talk.offload("a")
        for ours, theirs in zip(held(talk, "a"), again, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)  # rounded only once


def spoil(file: Path) -> None:
    *data, last = file.read_bytes()
    file.write_bytes(bytes([*data, last ^ 1]))


def test_a_damaged_file_is_found_and_the_line_read_anew(
    model: LanguageModel, files: Callable[[], list[Path]]
) -> None:
    talk = talk_of(model, verbatim=True)
    ask(talk, "a", "the use of an other")
    ask(talk, "b", "is it on?")
    for name, damage, why in (("a", spoil, "sha256"), ("b", Path.unlink, "cannot be read")):
        talk.offload(name, "disk")
        (file,) = files()
        damage(file)
        said = talk.messages
        with pytest.raises(kv.KVLingoError, match=f"the line of {name} is lost .*{why}.*ask again"):
            talk.reply(name, "and you")
        assert talk.messages == said and talk.lines[name].where == "empty"
        ask(talk, name, "and you")


def test_a_disk_that_cannot_be_written_costs_nothing(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, files: Callable[[], list[Path]]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    talk = talk_of(model)
    ask(talk, "a", "the use of an other")
    monkeypatch.setattr(storage, "write_arrays", full)
    with pytest.raises(OSError, match="cannot be kept on disk .No space left.* stays in memory"):
        talk.offload("a", "disk")
    assert talk.lines["a"].where == "resident" and not files()
    ask(talk, "a", "and you")
    with pytest.raises(ValueError, match="where is 'tape'; give 8bit or disk"):
        talk.offload("a", "tape")
    with pytest.raises(ValueError, match="offload is 'tape'; give 8bit or disk"):
        talk_of(model, offload="tape")


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    def printed(script: str) -> str:
        env = {**os.environ, "KVLINGO_HOME": str(tmp_path)}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    ended, root = printed("import os; print(os.getpid())"), tmp_path / "offload"
    for name in (f"{ended}-left", f"{os.getpid()}-ours"):
        (root / name).mkdir(parents=True)
        (root / name / "x.safetensors").write_bytes(b"x")
    made = printed("from kvlingo_mlx.engine.storage import _folder; print(_folder())")
    assert [path.name for path in root.iterdir()] == [f"{os.getpid()}-ours"]
    assert Path(made).parent == root  # and its own went when it ended


def active() -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_stats_agree_with_mlx(family: str, store: Path) -> None:
    """Weights, translators, lines and what is put away, against what MLX holds."""
    root = TESTS / "zoo"
    names = [f"tiny-{family}-{size}" for size in "sl"]
    folders = names if family == "qwen3" else [root / "models" / name for name in names]
    store.parent.mkdir()
    store.symlink_to(root / "translators")
    before = active()
    pair = dict(zip(names, (kv.load(folder) for folder in folders), strict=True))
    talk = kv.Conversation(pair, enable_thinking=False)
    for name in names:
        talk.reply(name, "The key of Anna is B4. " * 60, max_tokens=8)
        assert talk.stats().total == pytest.approx(active() - before, rel=0.05)
    for name, where in zip(names, ("8bit", "disk"), strict=True):
        held = active()
        said = talk.offload(name, where)
        assert said > 100_000 and held - active() == pytest.approx(said, rel=0.05)


def test_branches_of_a_line_that_is_still_being_written_are_apart(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, real = threading.Event(), storage.write_file

    def slow(*arguments: Any) -> str:
        assert go.wait(600)
        return real(*arguments)

    monkeypatch.setattr(storage, "write_file", slow)
    talk = talk_of(model, offload="disk", eager=False, verbatim=True)
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
    fresh = talk_of(model, eager=False, verbatim=True)
    ours = held(other, "a")
    finished(fresh.exchange.bring("a", other.lines["a"].tokens))
    for one, another in zip(ours, held(fresh, "a"), strict=True):
        np.testing.assert_allclose(one, another, atol=1e-5)


def test_nothing_changes_a_conversation_whose_answer_is_open(
    model: LanguageModel, tmp_path: Path
) -> None:
    talk = talk_of(model)
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
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = talk_of(model, verbatim=True)
    with monkeypatch.context() as patch:
        patch.setattr(type(talk.exchange), "follow", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.warns(UserWarning, match="the other lines could not follow"):
            ask(talk, "a", "the use of an other")
    assert len(talk.messages) == 2
    ask(talk, "b", "is it on?")


def test_another_model_or_translator_is_refused(
    model: LanguageModel, store: Path, tmp_path: Path
) -> None:
    talk = talk_of(model)
    ask(talk, "a", "the use of an other")
    folder, good = talk.save(tmp_path / "talk"), identity_of(model)
    kind, options = tiny.FAMILIES["qwen3"]
    other, tuned = (
        kv.load(tiny.write_tiny_model(tmp_path / name, kind, **{**options, **more}))
        for name, more in (("other", {"seed": 9}), ("tuned", {}))
    )
    with pytest.raises(ValueError, match="held with another model 'b' .*fingerprint differs"):
        Conversation.resume(folder, {"a": model, "b": other}, [good])
    assert tuned.spec().fingerprint == model.spec().fingerprint
    Conversation.resume(folder, {"a": model, "b": tuned}, [good])
    middle = tuned.model.layers[1]
    for module in (middle.self_attn.q_proj, middle.mlp.down_proj, tuned.model.model.embed_tokens):
        before = module.weight
        module.weight = 1.01 * before  # norms as they were
        with pytest.raises(ValueError, match="held with another model 'b' .*weights differs"):
            Conversation.resume(folder, {"a": model, "b": tuned}, [good])
        module.weight = before
    both = {"a": model, "b": model}
    with pytest.raises(ValueError, match="system is what the saved conversation has; give it"):
        Conversation.resume(folder, both, [good], system="x")
    with pytest.raises(ValueError, match="needs a model 'b' .*; there are a$"):
        Conversation.resume(folder, {"a": model}, [good])
    with pytest.raises(kv.IncompatibleTranslatorError, match="from a to b .*none is given"):
        Conversation.resume(folder, both)
    alone = Conversation.resume(folder, both, on_missing="reprefill")
    ask(alone, "b", "is it on?")  # its cache holds what was translated; the rest it reads
    needed = f"from a to b .*sha256 {good.digest[:12]}.*other weights"
    with pytest.raises(kv.IncompatibleTranslatorError, match=needed):
        Conversation.resume(folder, both, [identity_of(model, capture="post_norm")])
    joined = Conversation.resume(folder, {**both, "c": model}, [good])
    ask(joined, "c", "is it on?")  # one more may join


def test_a_damaged_folder_is_refused(model: LanguageModel, tmp_path: Path) -> None:
    talk = talk_of(model)
    ask(talk, "a", "the use of an other")
    folder = talk.save(tmp_path / "talk")
    resume(folder, model)
    facts = json.loads((folder / "conversation.json").read_text())
    changes: tuple[tuple[Callable[[Any], Any], str], ...] = (
        (lambda f: f.update(version=3), "is of format version 3; this version reads 6"),
        (lambda f: f.update(format="x"), "it is no kvlingo-conversation"),
        (lambda f: f.update(active="b"), "its digest is another one"),
        (lambda f: f.pop("digest"), "its digest is another one"),
    )
    # A stranger may give what he made a digest that fits.
    forged: tuple[tuple[Callable[[Any], Any], str], ...] = (
        (lambda f: f.pop("lines"), "KeyError: 'lines'"),
        (lambda f: f.update(lines=f["lines"].replace('"tokens": [', '"tokens": [1, ')), "it ends"),
        (lambda f: f.update(lines=f["lines"].replace('"offset": ', '"offset": 9')), "it ends"),
        (lambda f: f.update(file="../x"), "names a file"),
        (lambda f: f["transcript"].pop("states"), "KeyError: 'states'"),
    )
    for change, message in (*changes, *forged):
        changed = json.loads(json.dumps(facts))
        change(changed)
        if (change, message) in forged:
            del changed["digest"]
            changed["digest"] = digest_of(changed)
        (folder / "conversation.json").write_text(json.dumps(changed))
        with pytest.raises(kv.MalformedConversationError, match=message):
            resume(folder, model)
    (folder / "conversation.json").write_text(json.dumps(facts))
    (file,) = folder.glob("lines.*")
    spoil(file)
    with pytest.raises(kv.MalformedConversationError, match="is damaged: its sha256 is"):
        resume(folder, model)
    file.unlink()
    with pytest.raises(kv.MalformedConversationError, match="cannot be read"):
        resume(folder, model)
    (folder / "conversation.json").write_text("{")
    with pytest.raises(kv.MalformedConversationError, match="conversation.json: "):
        resume(folder, model)
    with pytest.raises(kv.MalformedConversationError, match="is no saved conversation"):
        resume(tmp_path / "nowhere", model)


def test_an_interrupted_save_leaves_the_old_conversation(
    model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = talk_of(model)
    ask(talk, "a", "the use of an other")
    folder, said = talk.save(tmp_path / "talk"), talk.messages
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    ask(talk, "b", "is it on?")
    left = [0]

    def cut(real: Any) -> Any:
        def called(*given: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return real(*given)

        return called

    with monkeypatch.context() as patch:
        for room, name in ((os, "replace"), (folders, "write_file")):
            patch.setattr(room, name, cut(getattr(room, name)))
        for at in (1, 2):  # the lines' file, the facts
            for where in (folder, tmp_path / "new"):
                left[0] = at
                with pytest.raises(KeyboardInterrupt):
                    talk.save(where)
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
            assert not (tmp_path / "new").exists()
    assert resume(folder, model).messages == said
    (folder / f"line-0.{'0' * 16}.safetensors").write_bytes(b"")  # of version 5
    assert len(list(talk.save(folder).iterdir())) == 1 + 1  # over the old one
    assert resume(folder, model).messages == talk.messages
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / ".DS_Store").write_text("x")
    talk.save(mine)  # what a file manager leaves is nobody's
    (mine / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match="exists and is not a saved conversation"):
        talk.save(mine)
    with pytest.raises(ValueError, match="is a file; name a folder"):
        talk.save(mine / "notes.txt")


def test_measure_reprefill(model: LanguageModel) -> None:
    talk = talk_of(model)
    with pytest.raises(ValueError, match="no model has answered yet"):
        talk.measure_reprefill()
    ask(talk, "a", "the use of an other")
    before = held(talk, "a")
    assert talk.measure_reprefill() > 0
    equal(held(talk, "a"), before)
