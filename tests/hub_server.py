"""A Hub on this machine: the endpoints that huggingface_hub asks, with the answers, headers and redirects of the real
one, and a cache laid out as huggingface_hub lays it out.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

COMMIT, OLDER = "c0" * 20, "0d" * 20
LARGE = (".safetensors", ".bin", "tokenizer.json")  # kept beside git and served from elsewhere, by sha256


@dataclass
class Hub:
    """Repositories: commit -> file -> bytes, and what has been asked of them."""

    endpoint: str = ""
    storage: str = ""  # of large files: another host, as it is for the real one
    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": OLDER})
    closed: tuple[int, str] | None = None  # the status and error code of every file; the listing stays open
    faults: list[int] = field(
        default_factory=list
    )  # of large files, in turn: a status, or bytes after which it hangs up
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range

    def files_asked(self) -> set[str]:
        """Names of the files asked for, by HEAD or GET."""
        return {path.split("/resolve/")[1].split("/", 1)[1] for _, path, _ in self.asked if "/resolve/" in path}

    def commits_asked(self) -> set[str]:
        """Revisions that files were asked at."""
        return {path.split("/resolve/")[1].split("/")[0] for _, path, _ in self.asked if "/resolve/" in path}

    def ranges(self) -> list[str | None]:
        """The Range of every large file's GET."""
        return [bytes_ for method, path, bytes_ in self.asked if method == "GET" and path.startswith("/large/")]

    def large(self) -> dict[str, bytes]:
        contents = [data for commits in self.repos.values() for files in commits.values() for data in files.values()]
        return {hashlib.sha256(data).hexdigest(): data for data in contents}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def etag_of(name: str, data: bytes) -> str:
    """sha256 of a large file, git's hash of another."""
    if name.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def write_cache(cache: Path, name: str, files: dict[str, bytes], commit: str, ref: str | None = "main") -> Path:
    """A snapshot as huggingface_hub leaves it: links into blobs. Returns its folder."""
    storage = cache / f"models--{name.replace('/', '--')}"
    snapshot = storage / "snapshots" / commit
    (storage / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True)
    for file, data in files.items():
        (storage / "blobs" / etag_of(file, data)).write_bytes(data)
        (snapshot / file).symlink_to(Path("../../blobs") / etag_of(file, data))
    if ref:
        (storage / "refs").mkdir(exist_ok=True)
        (storage / "refs" / ref).write_text(commit)
    return snapshot


def turn_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where huggingface_hub asks from now on, as HF_ENDPOINT would say before it is imported."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            answer(hub, self)

        def do_GET(self) -> None:
            answer(hub, self)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.endpoint, hub.storage = (f"http://{host}:{server.server_port}" for host in ("127.0.0.1", "localhost"))
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answer(hub: Hub, request: BaseHTTPRequestHandler) -> None:
    path = unquote(urlsplit(request.path).path)
    if path == "/api/agent-harnesses":  # by huggingface_hub for its own ends, once in a while
        return refuse(request, 404, "")
    hub.asked.append((request.command, path, request.headers.get("Range")))
    if path.startswith("/large/"):
        return send_large(hub, request, path.removeprefix("/large/"))
    api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
    file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
    name, revision = (api[1], api[3] or "main") if api else (file[1], file[2]) if file else ("", "")
    if name not in hub.repos:
        return refuse(request, 401, "RepoNotFound")
    commit = hub.refs.get(revision, revision)
    if commit not in hub.repos[name]:
        return refuse(request, 404, "RevisionNotFound")
    files = hub.repos[name][commit]
    if api:
        tree = [entry(path, data) for path, data in files.items()]
        info = {"id": name, "modelId": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]}
        return send(request, 200, {"Content-Type": "application/json"}, json.dumps(tree if api[2] == "tree" else info))
    assert file
    if hub.closed:
        return refuse(request, *hub.closed)
    if file[3] not in files:
        return refuse(request, 404, "EntryNotFound")
    data = files[file[3]]
    etag, headers = etag_of(file[3], data), {"X-Repo-Commit": commit}
    if not file[3].endswith(LARGE):
        return send(request, 200, headers | {"ETag": f'"{etag}"'}, data)
    linked = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data)), "Location": f"{hub.storage}/large/{etag}"}
    send(request, 302, headers | linked, b"")


def entry(path: str, data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": etag_of("", data)}
    if path.endswith(LARGE):
        found["lfs"] = {"oid": etag_of(path, data), "size": len(data), "pointerSize": 130}
    return found


def send_large(hub: Hub, request: BaseHTTPRequestHandler, etag: str) -> None:
    data = hub.large()[etag]
    fault = hub.faults.pop(0) if hub.faults and request.command == "GET" else None
    if fault in {404, 503}:
        return refuse(request, fault, "")
    asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range") or "")
    start = int(asked[1]) if asked else 0
    headers = {"ETag": f'"{etag}"'} | ({"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if asked else {})
    send(request, 206 if asked else 200, headers, data[start:], fault)


def refuse(request: BaseHTTPRequestHandler, status: int, code: str) -> None:
    send(request, status, {"X-Error-Code": code} if code else {}, b"")


def send(
    request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes | str, cut: int | None = None
) -> None:
    data = body.encode() if isinstance(body, str) else body
    request.send_response(status)
    for key, value in ({"Content-Length": str(len(data))} | headers).items():
        request.send_header(key, value)
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(data[:cut])
