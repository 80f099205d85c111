"""Row 55: locale, clock, HOME, odd paths, disks that cannot be written or synchronised."""

import errno
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.format import atomic, translator_folder
from kvlingo_mlx.loading import translators
from tests.support import tiny
from tests.support.command_line import RECORD
from tests.support.fixtures import Folders, Patch, Printed
from tests.support.processes import command_line

PROMPT = "Größe: naïve 数字 🎈"


def command(*words: str, **variables: str | None) -> subprocess.CompletedProcess[bytes]:
    """kvlingo-mlx in a process of its own; a variable that is None is not set there."""
    merged = {**os.environ, **variables}
    environment = {name: text for name, text in merged.items() if text is not None}
    return subprocess.run(command_line(*words), capture_output=True, env=environment)


def generate(source: Path, target: Path, *more: str) -> list[str]:
    return ["generate", "--prefill-model", str(source), "--decode-model", str(target),
            "--max-tokens", "4", "-c", "ignore_chat_template=true", "--json", "-",
            "--prompt", PROMPT, *more]  # fmt: skip


def test_another_locale_no_home_and_no_hub_cache(folders: Folders, capsys: Printed) -> None:
    """The C locale, a prompt beyond ASCII, no HOME, no KVLINGO_HOME, a Hub cache that cannot be
    written: as anywhere else, since a folder or an embedded model asks for none of these."""
    words = generate(folders["dense"], folders["dense"], "--strategy", "native")
    assert run(words) == 0
    usual = capsys.readouterr().out
    bare = command(
        *words, LC_ALL="C", LANG=None, PYTHONUTF8=None, HOME=None, KVLINGO_HOME=None,
        XDG_CACHE_HOME=None, HF_HOME="/dev/null/cache",
    )  # fmt: skip
    assert bare.returncode == 0, bare.stderr[-500:]
    texts = [json.loads(out.splitlines()[-1])["results"] for out in (usual, bare.stdout)]
    assert texts[0]["text"] == texts[1]["text"]
    assert texts[0]["prompt_tokens"] == texts[1]["prompt_tokens"] > len(PROMPT)


def test_text_of_another_locale(folders: Folders) -> None:
    """What Python makes of bytes that its locale has no letters for."""
    model = kv.load(folders["dense"])
    with pytest.raises(ValueError, match="not valid Unicode .*; .*set PYTHONUTF8=1 where"):
        kv.generate(model, model, "na\udcc3\udcafve", strategy="native")


def test_a_user_without_a_home(monkeypatch: Patch) -> None:
    """As in a container whose user the system does not know."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KVLINGO_HOME")
    monkeypatch.setattr(translators.Path, "home", unknown)
    with pytest.raises(ValueError, match="no home folder .* set KVLINGO_HOME to a folder"):
        translators.store()


@pytest.mark.parametrize("name", ["-dash", "two wörds 数字; $HOME a'b"])
def test_odd_paths(
    folders: Folders, tmp_path: Path, monkeypatch: Patch, name: str, capsys: Printed
) -> None:
    """Models, data, translator and store under such a folder: fitted, imported, found, used."""
    place = tmp_path / name
    place.mkdir()
    monkeypatch.setenv("KVLINGO_HOME", str(place / "home"))
    models = {n: place / f"{n} {name}" for n in ("dense", "moe")}
    for n, folder in models.items():
        folder.symlink_to(folders[n])
    (place / "data.jsonl").write_text(RECORD)
    out = place / "made"
    assert run(["fit", "--source", str(models["dense"]), "--target", str(models["moe"]),
                "--data", str(place / "data.jsonl"), "--out", str(out)]) == 0  # fmt: skip
    assert run(["import", str(out)]) == 0
    (stored,) = translators.store().iterdir()
    assert re.fullmatch(r"[\w.-]+", stored.name)
    assert run(["show", str(out)]) == 0
    capsys.readouterr()
    assert run(generate(models["dense"], models["moe"])) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["config"]["prompt"] == PROMPT
    assert record["results"]["strategy"] == "accelerator"


def test_a_hub_cache_that_cannot_be_written() -> None:
    """What has to be fetched is refused in a line."""
    done = command(
        "show", "nobody/nothing", HF_HOME="/dev/null/cache", HF_ENDPOINT="http://127.0.0.1:9",
        HF_HUB_OFFLINE="0",
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: there is no folder nobody/nothing, and the Hub did not give")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EIO])
def test_a_volume_that_cannot_be_synchronised(
    folders: Folders, tmp_path: Path, monkeypatch: Patch, number: int
) -> None:
    """Some network file systems refuse fsync; what is written there is whole all the same. A
    control: a disk that breaks loses numbers, and that is not passed over."""

    def refused(_: int) -> None:
        raise OSError(number, os.strerror(number))

    made = tiny.write_random_translator(tmp_path / "t", folders["dense"], folders["moe"])
    config, weights = translator_folder.read(made)
    monkeypatch.setattr(os, "fsync", refused)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            translator_folder.write(tmp_path / "copy", config, weights)
        return
    translator_folder.write(tmp_path / "copy", config, weights)
    assert translator_folder.read(tmp_path / "copy")[0] == config


def test_a_clock_that_goes_backwards(folders: Folders, tmp_path: Path, monkeypatch: Patch) -> None:
    """Nothing but dates goes by the wall clock: not times, and not who waits for a lock."""
    now = [2e9]

    def earlier() -> float:
        now[0] -= 1000.0
        return now[0]

    monkeypatch.setattr("time.time", earlier)
    model = kv.load(folders["dense"])
    responses = list(kv.stream_generate(model, model, "abc", strategy="native", max_tokens=2))
    assert responses[-1].ttft_s > 0
    with atomic.alone(tmp_path / "t"):
        pass
