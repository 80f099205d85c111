"""What a release brings besides the wheel: completion for three shells, and a Homebrew formula."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from kvlingo_mlx.cli import VERBS, run
from tests.support import ROOT, tool
from tests.support.fixtures import Patch, Printed

COMPLETE = "_KVLINGO_MLX_COMPLETE"
MAC = {"platform_system": "Darwin", "sys_platform": "darwin", "platform_machine": "arm64"}


def typed(shell: str, line: str) -> dict[str, str]:
    """What a shell's own function sets when tab is pressed behind a line."""
    bash = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    others = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return {COMPLETE: f"complete_{shell}", **bash, **others}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_verbs_and_options_are_completed(shell: str, monkeypatch: Patch, capsys: Printed) -> None:
    def completed(variables: dict[str, str]) -> str:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            run([])
        return capsys.readouterr().out

    def words(line: str) -> set[str]:
        lines = completed(typed(shell, line)).removeprefix("_arguments '*: :((").splitlines()
        return {re.split(r'["\t]', text.lstrip('"'))[0] for text in lines}

    assert words("kvlingo-mlx ") == set(VERBS)
    assert words("kvlingo-mlx se") == {"serve", "serve-prefill"}
    assert words("kvlingo-mlx serve --ro") == {"--route"}
    assert "--model" in (flags := words("kvlingo-mlx serve --")) and "--heal" not in flags
    assert not words("kvlingo-mlx show x") & {*VERBS, "--help"}  # so the shell offers files
    script = completed({COMPLETE: f"source_{shell}"})
    assert f"{COMPLETE}=complete_{shell}" in script and "kvlingo-mlx" in script


def lacking(formula: str) -> set[str]:
    """The requirements that a formula does not meet on some Mac."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = map(Requirement, project["dependencies"] + project["optional-dependencies"]["server"])
    held = [parse_wheel_filename(f)[:2] for f in re.findall(r'/([\w.+-]+\.whl)"', formula)]
    return {
        str(need)
        for need in wanted
        if need.marker is None or need.marker.evaluate(MAC)
        if not (found := [version for name, version in held if name == need.name])
        or not all(version in need.specifier for version in found)
    }


def test_the_formula_brings_what_the_package_needs() -> None:
    """A requirement that has changed asks for `python tools/make_formula.py`."""
    script = tool("make_formula")
    text = script.FORMULA.read_text(encoding="utf-8")
    assert lacking(text) == set()
    assert lacking(text.replace("/mlx_lm-0.32", "/mlx_lm-0.31")) == {"mlx-lm<0.33,>=0.32.2"}
    assert lacking(re.sub(r"/numpy-.*", "", text)) == {"numpy<3,>=2"}
    resources = text[text.index("  resource ") : text.index("\n  def install")]
    whole = rf'" do\n +url "{script.FILES}/\S+", using: :nounzip\n +sha256 "\w{{64}}"\n'
    assert len(re.findall(whole, resources)) == resources.count("resource ") > 30
    assert text == script.formula(resources)  # the rest is not edited by hand
