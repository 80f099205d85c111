"""A Hugging Face Hub on the loopback interface: folders as repositories, every request noted."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import threading
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Repository:
    """A folder under an id.

    ``commits`` maps revisions (branches, tags, hashes) to folders; ``gated`` repositories
    refuse their files.
    """

    commits: dict[str, tuple[str, Path]]
    gated: bool = False


@dataclass
class LoopbackHub:
    """Serves repositories until closed."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)  # method and path of each
    tokens: set[str] = field(default_factory=set)  # the authorization headers
    uploads: Path | None = None  # a folder; None refuses every upload
    private: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def do_POST(self) -> None:
                hub.receive(self)

            do_PUT = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def add(self, repo_id: str, folder: Path, *revisions: str, gated: bool = False) -> str:
        """Publish a folder as a repository's ``main`` (or these revisions); returns the commit."""
        commit = hashlib.sha1(str(folder).encode()).hexdigest()
        known = self.repositories.get(repo_id, Repository({}))
        names = (commit, *(revisions or ("main",)))
        commits = {**known.commits, **{name: (commit, folder) for name in names}}
        self.repositories[repo_id] = Repository(commits, gated)
        return commit

    def files_sent(self) -> set[str]:
        """Names of the files that were asked for."""
        return {
            urllib.parse.unquote(r.split("/resolve/")[1].split("/", 1)[1])
            for r in self.requests
            if "/resolve/" in r
        }

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    # ---- answers ----------------------------------------------------------------------

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = urllib.parse.urlparse(request.path).path
        self.requests.append(f"{request.command} {path}")
        self.tokens.add(request.headers.get("authorization", ""))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 6:
            self._api("/".join(parts[2:4]), parts[4], urllib.parse.unquote(parts[5]), request)
        elif len(parts) >= 5 and parts[2] == "resolve":
            name = urllib.parse.unquote("/".join(parts[4:]))
            self._file("/".join(parts[:2]), parts[3], name, request)
        else:
            _send(request, 404, b"")

    # ---- uploads ----------------------------------------------------------------------

    def receive(self, request: http.server.BaseHTTPRequestHandler) -> None:
        """What an upload asks, in its order: repository, branch, upload modes, blobs, commit."""
        path = urllib.parse.urlparse(request.path).path
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        self.requests.append(f"{request.command} {path}")
        self.tokens.add(request.headers.get("authorization", ""))
        parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/")]
        if self.uploads is None:
            _send(request, 403, b"")
        elif parts == ["api", "validate-yaml"]:
            _json(request, {"errors": [], "warnings": []})
        elif parts == ["api", "repos", "create"]:
            self._create(json.loads(body), request)
        elif parts[:2] == ["api", "models"] and parts[4] == "branch":
            repository = self.repositories["/".join(parts[2:4])]
            repository.commits.setdefault(parts[5], repository.commits["main"])
            _json(request, {})
        elif parts[:2] == ["api", "models"] and parts[4] == "preupload":
            files = [
                {"path": file["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"}
                for file in json.loads(body)["files"]
            ]  # fmt: skip
            _json(request, {"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for blob in objects:
                blob["actions"] = {"upload": {"href": f"{self.url}/blobs/{blob['oid']}"}}
            _json(request, {"transfer": "basic", "objects": objects})
        elif parts[0] == "blobs":
            assert hashlib.sha256(body).hexdigest() == parts[1], "another content than promised"
            (self.uploads / parts[1]).write_bytes(body)
            _send(request, 200, b"")
        elif parts[:2] == ["api", "models"] and parts[4] == "commit":
            self._commit("/".join(parts[2:4]), parts[5], body, request)
        else:
            _send(request, 404, b"")

    def _create(self, asked: dict, request) -> None:
        repo_id = f"{asked.get('organization') or 'me'}/{asked['name']}"
        status = 409 if repo_id in self.repositories else 200
        if status == 200:
            self.add(repo_id, self._new_folder())
            if asked.get("private") or asked.get("visibility") == "private":
                self.private.add(repo_id)
        _json(request, {"url": f"{self.url}/{repo_id}"}, status)

    def _new_folder(self) -> Path:
        assert self.uploads is not None
        folder = self.uploads / f"repository-{len(list(self.uploads.iterdir()))}"
        folder.mkdir()
        return folder

    def _commit(self, repo_id: str, revision: str, body: bytes, request) -> None:
        assert self.uploads is not None
        folder = self._new_folder()
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                (folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
            if line["key"] == "lfsFile":
                (folder / value["path"]).write_bytes((self.uploads / value["oid"]).read_bytes())
        commit = self.add(repo_id, folder, revision)
        url = f"{self.url}/{repo_id}/commit/{commit}"
        _json(request, {"commitUrl": url, "commitOid": commit})

    def _find(self, repo_id: str, revision: str, request) -> tuple[str, Path] | None:
        repository = self.repositories.get(repo_id)
        if repository is None:
            _send(request, 404, b"", {"X-Error-Code": "RepoNotFound"})
            return None
        if revision not in repository.commits:
            _send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
            return None
        return repository.commits[revision]

    def _api(self, repo_id: str, what: str, revision: str, request) -> None:
        found = self._find(repo_id, revision, request)
        if found is None:
            return
        commit, folder = found
        files = sorted(p for p in folder.iterdir() if p.is_file())
        if what == "revision":
            siblings = [{"rfilename": p.name} for p in files]
            answer: object = {
                "id": repo_id,
                "modelId": repo_id,
                "sha": commit,
                "siblings": siblings,
            }
        else:
            answer = [
                {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": _etag(p)}
                for p in files
            ]
        _send(request, 200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, repo_id: str, revision: str, name: str, request) -> None:
        found = self._find(repo_id, revision, request)
        if found is None:
            return
        if self.repositories[repo_id].gated:
            _send(request, 403, b"", {"X-Error-Code": "GatedRepo"})
            return
        commit, folder = found
        path = folder / name
        if not path.is_file():
            _send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": commit}
        _send(request, 200, path.read_bytes(), headers)


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _json(request, answer: object, status: int = 200) -> None:
    _send(request, status, json.dumps(answer).encode(), {"Content-Type": "application/json"})


def _send(request, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    request.send_response(status)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
