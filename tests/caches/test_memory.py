"""Row 44: what does not fit into memory is refused before it is read, and nothing else is."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.caches import memory
from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import zoo_pairs
from kvlingo_mlx.loading import models
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import tiny
from tests.support.fixtures import Folders, Models, Patch, Printed
from tests.support.identity import TOKENS, identity_of

ENDS = ("dense", "moe")


@pytest.fixture
def limited(monkeypatch: Patch) -> Callable[[float], None]:
    """Leaves so many bytes for what is yet to be made, whatever the tests before still hold."""

    def leave(count: float) -> None:
        monkeypatch.setattr(memory.mx, "get_active_memory", lambda: 0)
        monkeypatch.setenv(memory.LIMIT, f"{count / 1e9:.9f}")

    return leave


@pytest.fixture
def reads(monkeypatch: Patch) -> list[str]:
    """The models whose weights were read."""
    found: list[str] = []
    read = models.read_weights

    def noted(model: LanguageModel) -> None:
        found.append(model.name)
        read(model)

    monkeypatch.setattr(models, "read_weights", noted)
    return found


def translator_between(folders: Folders, folder: Path) -> Path:
    return tiny.write_random_translator(folder, *(folders[name] for name in ENDS))


def test_all_is_summed_before_anything_is_read(
    folders: Folders, tmp_path: Path, limited: Callable[[float], None], reads: list[str]
) -> None:
    translator = translator_between(folders, tmp_path / "t")
    weights = sum((folders[name] / "model.safetensors").stat().st_size for name in ENDS)
    maps = (translator / "translator.safetensors").stat().st_size
    tokens = TOKENS * 9
    pair = [str(folders[name]) for name in ENDS]
    caches_ = sum(memory.cache_bytes(kv.load(p, lazy=True), len(tokens)) for p in pair)
    limited(weights + maps + caches_ / 2)
    with pytest.raises(kv.NotEnoughMemoryError) as caught:
        kv.hand_over(*pair, tokens, translator=translator)
    text = str(caught.value)
    total = (weights + maps + caches_) / 1e6
    for part in (f"weights of {pair[0]} ", f"weights of {pair[1]} ", "translator ",
                 f"caches of {len(tokens)} tokens ", "mlx_lm.convert -q", "shorter prompt",
                 f"set {memory.LIMIT}=0"):  # fmt: skip
        assert part in text, part
    needed, there = (float(text.split(" MB")[0]), float(text.split("), and ")[1].split(" MB")[0]))
    assert needed == pytest.approx(total, abs=0.15) and there < needed
    assert reads == []
    limited(weights + maps + 2 * caches_)
    kv.hand_over(*pair, tokens, translator=translator)
    assert reads == pair


def test_a_prompt_beyond_what_is_left(models: Models, limited: Callable[[float], None]) -> None:
    """Models that are loaded already: their caches are held against what is left."""
    model = models["dense"]
    translator = identity_of(model)
    each = memory.cache_bytes(model, len(TOKENS))
    pair = model, model
    kv.generate(*pair, TOKENS, translator=translator, max_tokens=1)
    limited(1.5 * each)
    message = (
        f"memory are needed .caches of {len(TOKENS)} tokens .* are available; .* shorter prompt"
    )
    for action in (kv.hand_over, kv.generate):
        with pytest.raises(kv.NotEnoughMemoryError, match=message):
            action(*pair, TOKENS, translator=translator)
    limited(2.5 * each)
    assert kv.generate(*pair, TOKENS, strategy="native", max_tokens=1) is not None


def test_one_line_on_the_command_line(
    folders: Folders, tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    translator = translator_between(folders, tmp_path / "t")
    pair = [str(folders[name]) for name in ENDS]
    ends = ["--source", pair[0], "--target", pair[1]]
    (tmp_path / "d.jsonl").write_text('{"text": "one two three four five six"}\n')
    verbs = (
        ["generate", "--prefill-model", pair[0], "--decode-model", pair[1], "--prompt", "abc"],
        ["fit", *ends, "--data", str(tmp_path / "d.jsonl"), "--out", str(tmp_path / "o")],
        ["verify", str(translator), *ends],
        ["bench", *ends],
        ["chat", "--model", f"a={pair[0]}", "--model", f"b={pair[1]}"],
    )
    monkeypatch.setenv(memory.LIMIT, "1e-6")
    for words in verbs:
        assert run(words) == 2, words
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and "of memory are needed" in line, words
    assert not (tmp_path / "o").exists()
    for text in ("much", "-1", "nan"):
        monkeypatch.setenv(memory.LIMIT, text)
        assert run(verbs[0]) == 2
        assert f"{memory.LIMIT} is {text!r}; give a number" in capsys.readouterr().err


def test_the_limit_of_metal_and_of_other_gpus(monkeypatch: Patch) -> None:
    """What MLX says of the device, less what it holds; what it does not say refuses nobody."""
    monkeypatch.setattr(memory, "on_gpu", lambda: True)
    held = 3 * 10**9
    monkeypatch.setattr(memory.mx, "get_active_memory", lambda: held)
    metal = {"max_recommended_working_set_size": 12 * 10**9, "memory_size": 16 * 10**9}
    for info, expected in ((metal, 9 * 10**9), ({"total_memory": 80 * 10**9}, 77 * 10**9),
                           ({"total_memory": 10**9}, 0), ({}, None)):  # fmt: skip
        monkeypatch.setattr(memory.mx, "device_info", lambda info=info: info)
        assert memory.free() == expected
    memory.check({"weights of a": 10**15})
    monkeypatch.setattr(memory.mx, "device_info", lambda: metal)
    memory.check({"weights of a": 9 * 10**9})
    with pytest.raises(kv.NotEnoughMemoryError) as caught:
        memory.check({"weights of a": 8 * 10**9, "weights of b": 2 * 10**9})
    assert str(caught.value).startswith(
        "10.0 GB of memory are needed (weights of a 8.0 GB, weights of b 2.0 GB), and 9.0 GB are"
    )


def test_the_limit_of_a_cpu(monkeypatch: Patch) -> None:
    """What the system can give without swapping, and no more than a container may have."""
    files: dict[str, str] = {}
    monkeypatch.setattr(memory, "on_gpu", lambda: False)
    monkeypatch.setattr(memory, "_text", lambda path: files.get(path, ""))
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10**6}.get)
    monkeypatch.setattr(memory.mx, "get_active_memory", lambda: 96 * 10**6)
    assert memory.free() == 4 * 10**9  # macOS: all there is, less what MLX holds
    files["/proc/meminfo"] = "MemTotal: 9 kB\nMemAvailable:   2000000 kB\nBuffers: 1 kB\n"
    assert memory.free() == 2048 * 10**6
    files[memory.CGROUPS[0]] = "max\n"
    files[memory.CGROUPS[1]] = "9223372036854771712\n"
    assert memory.free() == 2048 * 10**6
    files[memory.CGROUPS[0]] = "1096000000\n"
    assert memory.free() == 10**9
    monkeypatch.setenv(memory.LIMIT, "0")
    assert memory.free() is None


def test_no_false_alarm(tmp_path: Path, reads: list[str]) -> None:
    """The zoo runs in a tenth of a gigabyte, whatever is free here; so says this machine, too."""
    there = memory.free()
    assert there is None or there > 10**8
    for source, target in zoo_pairs():
        models.load_together([source, target], "What is on?" * 200)
    assert len(reads) == 2 * len(zoo_pairs())


def test_what_cannot_be_sized_is_left_to_its_reader(folders: Folders, tmp_path: Path) -> None:
    """A translator that is absent, damaged or a crafted file of 60 GB says so itself."""
    pair = [str(folders[name]) for name in ENDS]
    with pytest.raises(kv.MissingTranslatorError):
        kv.hand_over(*pair, TOKENS, translator=tmp_path / "absent")
    folder = translator_between(folders, tmp_path / "t")
    with open(folder / "translator.safetensors", "ab") as file:
        file.truncate(60 * 10**9)
    with pytest.raises(kv.MalformedTranslatorError, match="expected at most"):
        kv.hand_over(*pair, TOKENS, translator=folder)
    shutil.rmtree(folder)
    with pytest.raises(kv.MissingTranslatorError, match="is in the local store; make one"):
        kv.generate(*pair, TOKENS)
