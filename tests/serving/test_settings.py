"""Settings from a file and from options: what is taken, and how what is wrong is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlingo_mlx.cli import run
from kvlingo_mlx.cli.command import named_models
from kvlingo_mlx.options import read_as
from kvlingo_mlx.serving import server, settings
from kvlingo_mlx.serving.settings import PairRule, Settings
from tests.support.fixtures import Patch, Printed

MODELS = {"small": "a", "large": "b"}


@pytest.fixture(autouse=True)
def served(monkeypatch: Patch) -> list[Settings]:
    """The settings with which the verb would have served."""
    found: list[Settings] = []
    monkeypatch.delenv(settings.API_KEY, raising=False)

    def noted(settings: Settings, listening: Callable[[str], None]) -> None:
        found.append(settings)
        listening("http://localhost:1")

    monkeypatch.setattr(server, "serve", noted)
    monkeypatch.setattr(server, "log_to_stderr", lambda level: None)
    return found


def write(folder: Path, text: str) -> str:
    path = folder / "server.toml"
    path.write_text(text)
    return str(path)


def test_tables_of_a_file_are_read(served: list[Settings], tmp_path: Path) -> None:
    text = "max_kl=0.5\n[models]\na='x'\nb='y'\n[pairs.'a:b']\nmax_kl=0.2\nshortest=64"
    assert run(["serve", "--config", write(tmp_path, text)]) == 0
    typed = ["a=x", "b=y", "--max-kl", "0.5", "-c", 'pairs=a:b={"max_kl": 0.2, "shortest": 64}']
    assert run(["serve", *typed]) == 0
    for found in served:
        assert found.models == {"a": "x", "b": "y"} and found.max_kl == 0.5
        assert found.pairs == {"a:b": PairRule(max_kl=0.2, shortest=64)}


def test_options_override_the_file(served: list[Settings], tmp_path: Path) -> None:
    config = write(tmp_path, 'port = 1\nmax_tokens = 2\n[models]\na = "x"\n')
    record = tmp_path / "record"
    words = ["serve", "--config", config, "--max-tokens", "3", "--memory-limit", "1GB"]
    assert run([*words, "--route", "r.toml", "--api-key", "hidden", "--json", str(record)]) == 0
    (got,) = served
    assert (got.port, got.max_tokens, got.memory_limit) == (1, 3, 10**9)
    assert got.models == {"a": "x"} and got.names == ("a", "auto")
    written = record.read_text()
    assert "hidden" not in written and json.loads(written)["results"]["url"] == "http://localhost:1"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[models]\na='x'\n[prot]", "unknown key 'prot'; did you mean port?"),
        ("max-token=3\n[models]\na='x'", "unknown key 'max_token'; did you mean max_tokens?"),
        ("zzz=3\n[models]\na='x'", "unknown key 'zzz'; known are allow_anyone, "),
        ("port=70000\n[models]\na='x'", "--port is 70000; give 0 to 65535"),
        ("port=true\n[models]\na='x'", "'--port': input should be a valid integer"),
        ("allow_anyone=9\n[models]\na='x'", "'--allow-anyone': "),
        (
            "memory_limit='much'\n[models]\na='x'",
            "--memory-limit is 'much'; give a number of bytes",
        ),
        ("keep_alive=0\n[models]\na='x'", "keep_alive is 0.0; give seconds above 0"),
        ("keep_alive=inf\n[models]\na='x'", "keep_alive is inf; give seconds above 0"),
        ("log_level='loud'\n[models]\na='x'", "--log-level is 'loud'; give debug, info"),
        ("on_doubt='reread'\n[models]\na='x'", "on_doubt has no effect with -c guard=0; give"),
        ("[models]\nauto='x'", "a model is named 'auto'"),
        ("[models]\na='x'\n[pairs.'a:b']", "pairs names 'a:b'; expected SOURCE:TARGET, two of a"),
        ("[models]\na='x'\n[pairs.'a:b']\nmaxkl=1", "pairs.a:b has the unknown key 'maxkl'"),
        ("[models]\na='x'\n[pairs.'a:b']\nmax_kl='x'", "pairs.a:b.max_kl is 'x', expected a n"),
        ("[models]\na='x'\n[pairs]\n'a:b'=1", "pairs.a:b is 1, expected an object"),
        ("", "no model is given; give NAME=MODEL"),
        ("port=", "is not valid TOML: "),
        ("host='0.0.0.0'\n[models]\na='x'", "and no key is set; give --api-key (or KVLINGO_API_K"),
    ],
)
def test_what_is_wrong_is_told(text: str, told: str, tmp_path: Path, capsys: Printed) -> None:
    assert run(["serve", "--config", write(tmp_path, text)]) == 2
    error = capsys.readouterr().err
    assert told.lower() in error.lower() and error.count("\n") == 1


def test_a_key_is_never_shown(served: list[Settings], monkeypatch: Patch, capsys: Any) -> None:
    typed = ["serve", "small=a", "large=b"]
    assert run([*typed, "--api-key", "two words"]) == 2
    assert "two words" not in capsys.readouterr().err
    monkeypatch.setenv(settings.API_KEY, "from-env")
    assert run([*typed, "--host", "0.0.0.0"]) == run([*typed, "--api-key", "typed"]) == 0
    assert [found.api_key for found in served] == ["from-env", "typed"]
    assert "from-env" not in repr(served)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24 * 10**9), ("512 MiB", 2**29), ("1.5k", 1500), ("7", 7), ("x", "x"), (None, None)],
)
def test_sizes(text: str | None, size: object) -> None:
    """What is none is left as it is, for the kind to refuse."""
    assert read_as(Settings.__dataclass_fields__["memory_limit"], text) == size


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_this_machine_alone_needs_no_key(host: str) -> None:
    assert Settings(models=MODELS, host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "localhost.evil"])
def test_other_hosts_need_a_key(host: str) -> None:
    with pytest.raises(ValueError, match="which others can reach"):
        Settings(models=MODELS, host=host)
    assert Settings(models=MODELS, host=host, api_key="k").host == host
    assert Settings(models=MODELS, host=host, allow_anyone=True).host == host


def test_models_are_named() -> None:
    assert named_models(["small=Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "./here/"]) == {
        "small": "Qwen/Qwen3-4B", "Qwen3-8B": "Qwen/Qwen3-8B", "here": "./here/",
    }  # fmt: skip
    for texts in (["=x"], ["a="], ["a=x", "a=y"], ["q/a", "p/a"]):
        with pytest.raises(ValueError, match="NAME=MODEL"):
            named_models(texts)
