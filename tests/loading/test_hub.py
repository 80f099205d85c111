"""Models and translators from the Hub: a real client against a server on the loopback."""

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from unittest.mock import create_autospec

import huggingface_hub
import numpy as np
import pytest
import safetensors.numpy
from huggingface_hub import HfApi, constants
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import zoo_names
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.store import publishing
from tests.support import tiny
from tests.support.fixtures import Folders, Patch, Printed
from tests.support.processes import WITHOUT_TORCH


class LoopbackHub(http.server.ThreadingHTTPServer):
    """Serves repositories until closed, and refuses uploads.

    ``repositories`` maps an id to revisions (branches, tags, hashes), and these to a commit's hash
    and folder; ``gated`` ones refuse their files.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.repositories: dict[str, dict[str, tuple[str, Path]]] = {}
        self.gated: set[str] = set()
        self.requests: list[str] = []  # method and path of each
        self.tokens: set[str] = set()  # the authorization headers
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def add(self, repo_id: str, folder: Path, *revisions: str) -> str:
        """Publish a folder as a repository's ``main`` (or these revisions); returns the commit."""
        commit = hashlib.sha1(str(folder).encode()).hexdigest()
        names = (commit, *(revisions or ("main",)))
        self.repositories.setdefault(repo_id, {}).update(dict.fromkeys(names, (commit, folder)))
        return commit

    def files_sent(self) -> set[str]:
        """Names of the files that were asked for."""
        found = (request.partition("/resolve/")[2] for request in self.requests)
        return {name.split("/", 1)[1] for name in found if name}


class Requests(http.server.BaseHTTPRequestHandler):
    """What the client asks: which commit a revision is, its files, or one of them."""

    protocol_version = "HTTP/1.1"
    server: LoopbackHub

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        self.server.tokens.add(self.headers.get("authorization", ""))
        form = r"/(?:api/models/)?([^/]+/[^/]+)/([a-z-]+)/([^/]+)/?(.*)"
        found = re.fullmatch(form, path)
        if found is None:
            return self.send(404)
        repo_id, what, revision, name = found.groups()
        commits = self.server.repositories.get(repo_id)
        if commits is None or revision not in commits:
            missing = "Repo" if commits is None else "Revision"
            return self.send(404, error=f"{missing}NotFound")
        commit, folder = commits[revision]
        files = sorted(p for p in folder.iterdir() if p.is_file())
        if what == "revision":
            siblings = [{"rfilename": file.name} for file in files]
            told = {"id": repo_id, "modelId": repo_id, "sha": commit, "siblings": siblings}
            return self.send(200, json.dumps(told).encode())
        if what != "resolve":
            facts = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name}
                     for f in files]  # fmt: skip
            return self.send(200, json.dumps(facts).encode())
        if repo_id in self.server.gated:
            return self.send(403, error="GatedRepo")
        if folder / name not in files:
            return self.send(404, error="EntryNotFound")
        body = (folder / name).read_bytes()
        tag = hashlib.sha1(body).hexdigest()
        return self.send(200, body, {"ETag": f'"{tag}"', "X-Repo-Commit": commit})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send(403)

    def send(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] = {}, *, error: str = ""
    ) -> None:
        self.send_response(status)
        told = {"X-Error-Code": error} if error else {}
        for name, value in {**headers, **told, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


TOKEN = "hf_averysecrettokenofsomebody"
FORMAT = {f"{name}.safetensors" for name in ("selftest", "translator")}
FORMAT |= {"README.md", "translator_config.json"}


@pytest.fixture(scope="module")
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub() as server:
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def clean(hub: LoopbackHub) -> None:
    for each in (hub.repositories, hub.gated, hub.requests, hub.tokens):
        each.clear()


@pytest.fixture
def translator(folders: Folders, tmp_path: Path) -> Path:
    """A translator folder between ``me/dense`` and ``me/moe``, beside a file that is not ours."""
    folder = tiny.write_random_translator(
        tmp_path / "translator", folders["dense"], folders["moe"], nu=2
    )
    config = json.loads((folder / "translator_config.json").read_text())
    for role, name in (("source", "dense"), ("target", "moe")):
        config[role]["name"] = f"me/{name}"
        config[role]["fingerprint"] = kv.load(folders[name]).spec().fingerprint
    (folder / "translator_config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text("A card of the author's.")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    return folder


Command = Callable[..., CompletedProcess[str]]


@pytest.fixture
def variables(hub: LoopbackHub, tmp_path: Path) -> dict[str, str]:
    """What leads a command to the loopback, its Hub cache in the test's folder."""
    return {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip


@pytest.fixture
def command(variables: dict[str, str], store: Path, monkeypatch: Patch, capsys: Printed) -> Command:
    """Run kvlingo-mlx in this process, which saves seconds: the client's constants are set by hand.

    In one of its own, where the client reads them itself, it runs for the token's sake below.
    """

    def run_here(*arguments: str, **environment: str) -> CompletedProcess[str]:
        given = variables | environment
        cache = Path(given["HF_HOME"]) / "hub"
        capsys.readouterr()
        with monkeypatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, value)
            url = given["HF_ENDPOINT"]
            for name, read in {
                "ENDPOINT": url, "HF_HOME": given["HF_HOME"], "HF_HUB_CACHE": str(cache),
                "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
                "HF_TOKEN_PATH": str(cache / "token"), "HF_HUB_DISABLE_XET": True,
                "HF_HUB_OFFLINE": given.get("HF_HUB_OFFLINE") == "1",
            }.items():  # fmt: skip
                patch.setattr(constants, name, read)
            huggingface_hub.close_session()
            disable_progress_bars()  # as ``main`` has it where nobody looks on
            status = run(list(arguments))
        enable_progress_bars()
        huggingface_hub.close_session()
        captured = capsys.readouterr()
        assert TOKEN not in captured.out + captured.err
        return CompletedProcess(arguments, status, captured.out, captured.err)

    return run_here


def stored(store: Path) -> TranslatorConfig:
    from kvlingo_mlx.format import translator_folder

    (folder,) = store.iterdir()
    assert {p.name for p in folder.iterdir()} == FORMAT
    return translator_folder.read(folder)[0]


def refused(done: CompletedProcess[str], *texts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert all(text in done.stderr for text in texts), done.stderr


def test_import_takes_only_the_format(hub: LoopbackHub, translator: Path, command, store) -> None:
    commit = hub.add("me/maps", translator)
    done = command("import", "me/maps")
    assert done.returncode == 0, done.stderr
    assert hub.files_sent() == FORMAT
    assert f"Bearer {TOKEN}" in hub.tokens  # so the test would see it leak
    assert "not checked against me/dense: me/dense is not on this machine" in done.stderr
    assert "imported me/dense to me/moe" in done.stdout
    assert stored(store).provenance["imported_from"] == f"me/maps@{commit}"


def test_import_takes_a_mapper_of_others(
    hub: LoopbackHub, tmp_path: Path, folders: Folders, command, store
) -> None:
    """VeloxQuant-MLX's two files; nothing else of the repository is sent."""
    folder = tmp_path / "mapper"
    folder.mkdir()
    end = {"n_layers": 3, "n_kv_heads": 2, "head_dim": 32, "rope_theta": 1e4, "model_type": "qwen3"}
    manifest = {
        "format_version": 1, "source": end, "target": end, "config": {"content_space": False},
        "layers": [{"target_layer": t, "source_layers": [t]} for t in range(3)],
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    maps = np.random.default_rng(0).normal(size=(2, 64, 32)).astype(np.float16)
    arrays = {f"{t}.w_{s}": maps for t in range(3) for s in "kv"}
    arrays |= {f"{t}.b_{s}": maps[:, 0].copy() for t in range(3) for s in "kv"}
    safetensors.numpy.save_file(arrays, folder / "mapper.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    commit = hub.add("me/mapper", folder)
    ends = ("--source", str(folders["dense"]), "--target", str(folders["dense"]))
    done = command("import", "me/mapper", *ends)
    assert done.returncode == 0, done.stderr
    assert hub.files_sent() == {"manifest.json", "mapper.safetensors"}
    assert stored(store).provenance["imported_from"] == f"me/mapper@{commit}"


def test_import_of_a_revision(
    hub: LoopbackHub, translator: Path, folders: Folders, command, store, tmp_path: Path
) -> None:
    newer = tiny.write_random_translator(tmp_path / "newer", folders["dense"], folders["moe"])
    hub.add("me/maps", newer)
    commit = hub.add("me/maps", translator, "v1")
    for revision in ("v1", commit):
        assert command("import", "me/maps", "--revision", revision).returncode == 0
        assert stored(store).nu == 2
        assert stored(store).provenance["imported_from"].endswith(commit)
    refused(
        command("import", "me/maps", "--revision", "v9"),
        "me/maps at revision v9: it has no such revision",
    )


def test_import_checks_the_models_at_hand(
    hub: LoopbackHub, translator: Path, folders: Folders, command, store, tmp_path: Path
) -> None:
    """Models that were downloaded are held against the translator; the Hub is not asked again."""
    hub.add("me/dense", folders["dense"])
    hub.add("me/moe", folders["moe"])
    for model in ("me/dense", "me/moe"):
        assert command("show", model).returncode == 0
    hub.repositories.clear()
    (translator / "pytorch_model.bin").unlink()
    done = command("import", str(translator))
    assert done.returncode == 0 and done.stderr == ""
    assert "imported_from" not in stored(store).provenance

    other = tiny.write_tiny_model(
        tmp_path / "other", "qwen3", seed=9, layers=3, kv_heads=2, head_dim=32
    )
    hub.add("me/dense", other)
    assert command("show", "me/dense").returncode == 0
    refused(command("import", str(translator)), "source model me/dense", "norms fingerprint")
    assert command("import", str(translator), "--allow-mismatch").returncode == 0


def test_offline(hub: LoopbackHub, translator: Path, command, store) -> None:
    """By the user's word, or since the Hub cannot be reached."""
    hub.add("me/maps", translator)
    refused(command("import", "me/maps", HF_HUB_OFFLINE="1"), "hf download me/maps")
    unreached = command("import", "me/maps", HF_ENDPOINT="http://127.0.0.1:9")
    refused(unreached, "cannot be reached, and it is not in the cache", "hf download me/maps")
    assert hub.requests == [] and not store.exists()
    assert command("import", "me/maps").returncode == 0
    hub.requests.clear()
    assert command("import", "me/maps", HF_HUB_OFFLINE="1").returncode == 0
    assert hub.requests == []


EACH = """
import sys, traceback
from kvlingo_mlx.cli import run
for words in sys.argv[1:]:
    try:
        run([*words.split(), "--debug"])
    except Exception:
        traceback.print_exc()
"""


def test_the_token_is_in_no_output_at_any_level(
    hub: LoopbackHub, translator: Path, variables: dict[str, str]
) -> None:
    """Tracebacks and every library's debug messages included; three commands in one process."""
    hub.add("me/maps", translator)
    hub.add("me/gated", translator)
    hub.gated.add("me/gated")
    loud = {"HF_DEBUG": "1", "HF_HUB_VERBOSITY": "debug", "TRANSFORMERS_VERBOSITY": "debug"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + EACH, "import me/maps", "import me/gated", "doctor"],
        capture_output=True, text=True, env={**os.environ, **variables, **loud},
    )  # fmt: skip
    assert TOKEN not in done.stdout + done.stderr and f"Bearer {TOKEN}" in hub.tokens
    assert "imported me/dense to me/moe" in done.stdout and "Request " in done.stderr
    assert "Traceback" in done.stderr and "me/gated" in done.stderr
    assert "mlx-lm" in done.stdout  # the doctor spoke


def test_what_the_hub_refuses(hub: LoopbackHub, translator: Path, command, store) -> None:
    refused(command("import", "me/absent"), "no such repository")
    hub.add("me/gated", translator)
    hub.gated.add("me/gated")
    refused(command("import", "me/gated"), "https://huggingface.co/me/gated")
    hub.add("me/partial", translator)
    (translator / "translator.safetensors").unlink()
    refused(command("import", "me/partial"), "translator.safetensors")
    refused(command("generate", "--prefill-model", "me/absent", "--decode-model", "me/absent",
                    "--prompt", "x"), "me/absent")  # fmt: skip
    assert not store.exists()


def test_generate_from_the_hub(
    hub: LoopbackHub, translator: Path, folders: Folders, command
) -> None:
    hub.add("me/dense", folders["dense"])
    hub.add("me/moe", folders["moe"])
    hub.add("me/maps", translator)
    pair = ["--prefill-model", "me/dense", "--decode-model", "me/moe", "--prompt", "Hello there"]
    done = command("generate", *pair, "--translator", "me/maps", "--max-tokens", "3")
    assert done.returncode == 0, done.stderr
    assert "Generation: 3 tokens" in done.stdout


def test_a_revision_of_what_has_none_is_refused(folders: Folders) -> None:
    """A folder, an embedded and a loaded model have one state, which is not that one perhaps."""
    for name, kind in ((folders["dense"], "is a folder"), (zoo_names()[0], "is an embedded model")):
        with pytest.raises(ValueError, match=f"revision is 'v1', but .* {kind}, which has none"):
            kv.load(name, revision="v1")
    model = kv.load(folders["dense"])
    assert kv.load(model) is model
    with pytest.raises(ValueError, match="revision has no effect on a model that is loaded"):
        kv.load(model, revision="v1")


def test_publish_uploads_the_formats_own_files(
    hub: LoopbackHub, command, translator: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """What was uploaded is what an import of it reads; the pickle beside it stays where it is."""
    api = create_autospec(HfApi, instance=True)

    def commit(repo: str, operations: list, *, revision: str, **told: str) -> SimpleNamespace:
        folder = tmp_path / "uploaded"
        folder.mkdir()
        for each in operations:
            with each.as_file() as file:
                (folder / each.path_in_repo).write_bytes(file.read())
        return SimpleNamespace(commit_url=f"commit/{hub.add(repo, folder, revision)}")

    api.create_commit.side_effect = commit
    monkeypatch.setattr(publishing, "HfApi", lambda: api)
    done = command("publish", str(translator), "me/new", "--private", "--revision", "v2")
    assert done.returncode == 0, done.stderr
    assert "left out, since they are no files of a translator: pytorch_model.bin" in done.stderr
    api.create_repo.assert_called_once_with("me/new", private=True, exist_ok=True)
    api.create_branch.assert_called_once_with("me/new", branch="v2", exist_ok=True)
    made, folder = hub.repositories["me/new"]["v2"]
    assert "ungraded" in done.stderr and f"commit/{made}" in done.stdout
    own = {p.name for p in translator.iterdir()} & FORMAT
    assert own and {p.name for p in folder.iterdir()} == own
    assert all((folder / n).read_bytes() == (translator / n).read_bytes() for n in own)
    there = ("--out", str(tmp_path / "back"), "--dtype", "float32", "--revision", "v2")
    back = command("import", "me/new", *there)
    assert back.returncode == 0, back.stderr
    assert "grade: ungraded: it has no receipt" in back.stdout
    mine, theirs = kv.load_translator(translator), kv.load_translator(tmp_path / "back")
    assert mine.digest == theirs.digest


def test_publish_without_a_token_fails(hub: LoopbackHub, command, translator: Path) -> None:
    done = command("publish", str(translator), "me/new", HF_TOKEN="")
    assert done.returncode == 2, done.stderr
    size = (translator / "translator.safetensors").stat().st_size
    assert f"translator.safetensors  {size:,} bytes" in done.stdout
    assert "error: nothing was uploaded: there is no token; log in" in done.stderr
    assert "`hf auth login`" in done.stderr and hub.requests == []
    dry = command("publish", str(translator), "me/new", "--dry-run")
    assert dry.returncode == 0 and "would upload" in dry.stdout and hub.requests == []


def test_what_publish_refuses(hub: LoopbackHub, command, translator: Path) -> None:
    def refused(*arguments: str, **environment: str) -> str:
        done = command("publish", *arguments, **environment)
        assert done.returncode == 2, done.stdout
        return next(line for line in done.stderr.splitlines() if line.startswith("error: "))

    nobody = "http://127.0.0.1:9"
    assert "may not write there" in refused(str(translator), "me/new")  # the Hub refuses
    assert "cannot be reached" in refused(str(translator), "me/new", HF_ENDPOINT=nobody)
    assert "give OWNER/NAME" in refused(str(translator), "new")
    assert "is no folder" in refused(str(translator / "none"), "me/new")
    weights = (translator / "translator.safetensors").read_bytes()
    (translator / "translator.safetensors").write_bytes(weights[:-8])
    hub.requests.clear()
    assert "translator.safetensors" in refused(str(translator), "me/new")
    assert hub.requests == []
