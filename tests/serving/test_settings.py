"""Settings from a file and from options: what is taken, and how what is wrong is told."""

import re
from pathlib import Path

import pytest

from kvlingo_mlx.cli.command import named_models
from kvlingo_mlx.serving import settings
from kvlingo_mlx.serving.settings import PairRule, Settings, read

MODELS = {"small": "a", "large": "b"}


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.API_KEY, raising=False)


def write(folder: Path, text: str) -> str:
    path = folder / "server.toml"
    path.write_text(text)
    return str(path)


def test_pairs_have_rules_of_their_own(tmp_path: Path) -> None:
    text = "max_kl=0.5\n[models]\na='x'\nb='y'\n[pairs.'a:b']\nmax_kl=0.2\nshortest=64"
    found = read(write(tmp_path, text), {})
    assert found.max_kl == 0.5 and found.pairs == {"a:b": PairRule(max_kl=0.2, shortest=64)}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[models]\na='x'\n[prot]", "unknown setting 'prot'; did you mean port?"),
        ("max-token=3\n[models]\na='x'", "unknown setting 'max-token'; did you mean max_tokens?"),
        ("zzz=3\n[models]\na='x'", "unknown setting 'zzz'; known are models, "),
        ("port=70000\n[models]\na='x'", "port is 70000; expected less than or equal to 65"),
        ("port=true\n[models]\na='x'", "port is True; expected a valid integer"),
        ("port='80'\n[models]\na='x'", "port is '80'; expected a valid integer"),
        ("allow_anyone=1\n[models]\na='x'", "allow_anyone is 1; expected a valid boolean"),
        ("memory_limit='much'\n[models]\na='x'", "memory_limit is 'much'; "),
        ("keep_alive=0\n[models]\na='x'", "keep_alive is 0; expected greater than 0"),
        ("keep_alive=inf\n[models]\na='x'", "keep_alive is inf; expected a finite number"),
        ("volatile=['a.*b']\n[models]\na='x'", "volatile[0] is 'a.*b'; expected how a line begins"),
        ("cors='http://a'\n[models]\na='x'", "cors is 'http://a'; expected a valid tuple"),
        ("log_level='loud'\n[models]\na='x'", "log_level is 'loud'; expected 'debug'"),
        ("models=3", "models is 3; expected a valid dictionary"),
        ("[models]\na=3", "models['a'] is 3; expected a valid string"),
        ("[models]\nauto='x'", "a model is named 'auto'"),
        ("[models]\na='x'\n[pairs.'a:b']", "pairs names 'a:b'; expected SOURCE:TARGET, two of a"),
        ("[models]\na='x'\n[pairs.'a:b']\nmaxkl=1", "pairs['a:b']['maxkl'] is 1; expected no such"),
        ("[models]\na='x'\n[pairs.'a:b']\nmax_kl=-1", "pairs['a:b']['max_kl'] is -1; expected "),
        ("", "no model is given; give --model NAME=MODEL"),
        ("port=", "is not valid TOML: "),
        ("host='0.0.0.0'\n[models]\na='x'", "and no key is set; give --api-key (or KVLINGO_API_K"),
    ],
)
def test_what_is_wrong_is_told(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as raised:
        read(write(tmp_path, text), {})
    assert "\n" not in str(raised.value)


def test_a_key_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError) as raised:
        read(None, {"models": MODELS, "api_key": "two words"})
    assert "two words" not in str(raised.value)
    monkeypatch.setenv(settings.API_KEY, "from-env")
    found = read(None, {"models": MODELS, "host": "0.0.0.0"})
    assert found.api_key == "from-env" and "from-env" not in repr(found)
    assert read(None, {"models": MODELS, "api_key": "typed"}).api_key == "typed"


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


def test_beginnings_of_volatile_lines_were_patterns_once() -> None:
    assert Settings(models=MODELS, volatile=["^Model: ", "cwd ("]).volatile == ("Model: ", "cwd (")
