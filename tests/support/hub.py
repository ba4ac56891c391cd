"""A whole model hub on this machine: what huggingface_hub asks of one, answered on 127.0.0.1.

It speaks the model's description, the tree of files, and `resolve` by HEAD and GET. As on the real hub, a small file
is found behind a redirect of the same host, and a large one behind a redirect to another host, the storage: to
huggingface_hub 1, another port is the same host, so the storage goes by another name of this machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]
Trick = Callable[["Answer"], bool]
"""Called before a request is answered; True where it has answered itself, or closed the connection."""

LARGE = (".safetensors", ".bin")
"""Endings of the files that lie in the storage."""


def files_of(folder: Path) -> Files:
    """The files of a folder, by the names that they have on the hub."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@dataclass
class Repository:
    """The commits of one model, and the branches and tags that name them."""

    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    """Files that are listed, and that only those see whom the owner lets in."""

    def commit(self, files: Files, *refs: str) -> str:
        """Adds a commit that `refs`, by default main, then name; returns its hash."""
        listed = json.dumps([len(self.commits), sorted((name, _sha1(data)) for name, data in files.items())])
        commit = _sha1(listed.encode())
        self.commits[commit] = files
        self.refs |= dict.fromkeys(refs or ("main",), commit)
        return commit

    def named(self, revision: str) -> str | None:
        """The commit of a branch, a tag, a commit's hash or the beginning of one."""
        if revision in self.refs:
            return self.refs[revision]
        near = [commit for commit in self.commits if len(revision) >= 7 and commit.startswith(revision)]
        return near[0] if len(near) == 1 else None


class Server(ThreadingHTTPServer):
    """A server that says nothing of connections that are broken off."""

    daemon_threads = True
    hub: Hub

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@dataclass
class Hub:
    """The hub: its repositories, what it was asked, and tricks that it plays.

    Attributes:
        asked: method and path of each request, in order.
        ranges: the ranges that were asked for.
        tricks: called before each request is answered.
        waits: seconds that huggingface_hub would have waited between two attempts, where a test notes them here.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    tricks: list[Trick] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    _servers: list[Server] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _ports: list[int] = field(default_factory=list)

    def start(self) -> None:
        """Listens on two ports of 127.0.0.1: those of the hub and of its storage."""
        for _ in range(2):
            server = Server(("127.0.0.1", 0), Answer)
            server.hub = self
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            self._servers.append(server)
            self._ports.append(server.server_port)
            self._threads.append(thread)

    def stop(self) -> None:
        """From now on connections are refused. May be called while a request is being answered."""
        self.over.set()
        while self._servers:
            server, thread = self._servers.pop(), self._threads.pop()
            server.shutdown()
            thread.join()
            server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def storage(self) -> str:
        return f"http://localhost:{self._ports[1]}"

    def add(self, name: str, files: Files, *refs: str) -> str:
        """Adds a commit to a repository; returns its hash."""
        return self.repositories.setdefault(name, Repository()).commit(files, *refs)

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """What a process needs to find this hub, with a cache of its own below `home`."""
        left = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
        return left | {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1,localhost", **more}

    def gets(self, ending: str) -> int:
        """How often a file whose path ends so was asked for by GET."""
        return sum(method == "GET" and path.endswith(ending) for method, path in self.asked)


class Answer(BaseHTTPRequestHandler):
    """One request and its answer."""

    server: Server
    hub: Hub

    def do_GET(self) -> None:
        self.hub = self.server.hub
        self.route = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, self.route))
        if "Range" in self.headers:
            self.hub.ranges.append(self.headers["Range"])
        if any(trick(self) for trick in self.hub.tricks):
            return
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if self.route.startswith("/api/models/"):
            self._describe(parts[2:])
        elif self.route.startswith("/api/resolve-cache/models/"):
            self._small("/".join(parts[3:5]), parts[5], "/".join(parts[6:]))
        elif self.route.startswith("/storage/"):
            self._stored(parts[1])
        elif parts[2:3] == ["resolve"]:
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.refuse(404, "RepoNotFound")

    do_HEAD = do_GET

    def _describe(self, parts: list[str]) -> None:
        """/api/models/ID, with /revision/REVISION or /tree/REVISION."""
        name, what, revision = "/".join(parts[:2]), parts[2:3], "/".join(parts[3:4]) or "main"
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self.refuse(404, "RepoNotFound")
        commit = repository.named(revision)
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        files = repository.commits[commit]
        if what == ["tree"]:
            under = "/".join(parts[4:])
            if under and not any(file.startswith(under + "/") for file in files):
                return self.refuse(404, "EntryNotFound")
            return self.answer(json.dumps([_entry(file, data) for file, data in files.items()]).encode())
        sizes = "blobs" in self.path
        siblings = [
            {"rfilename": file, **({"size": len(data), "blobId": _sha1(data)} if sizes else {})}
            for file, data in files.items()
        ]
        return self.answer(json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())

    def _resolve(self, name: str, revision: str, file: str) -> None:
        """/ID/resolve/REVISION/FILE: the facts of a file, and a redirect to where its bytes are."""
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self.refuse(404, "RepoNotFound")
        commit = repository.named(revision)
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        if file not in repository.commits[commit]:
            return self.refuse(404, "EntryNotFound", {"X-Repo-Commit": commit})
        if file in repository.hidden:
            return self.refuse(403, "GatedRepo", {"X-Repo-Commit": commit})
        facts, data = {"X-Repo-Commit": commit}, repository.commits[commit][file]
        if file.endswith(LARGE):
            digest = hashlib.sha256(data).hexdigest()
            facts |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{digest}"'}
            facts["Location"] = f"{self.hub.storage}/storage/{digest}"
            return self.answer(b"", 302, facts)
        facts |= {"ETag": f'"{_sha1(data)}"', "Location": f"/api/resolve-cache/models/{name}/{commit}/{file}"}
        return self.answer(b"", 307, facts)

    def _small(self, name: str, commit: str, file: str) -> None:
        data = self.hub.repositories[name].commits[commit][file]
        self.answer(data, headers={"X-Repo-Commit": commit, "ETag": f'"{_sha1(data)}"'})

    def _stored(self, digest: str) -> None:
        for repository in self.hub.repositories.values():
            for files in repository.commits.values():
                for data in files.values():
                    if hashlib.sha256(data).hexdigest() == digest:
                        return self.answer(data, headers={"ETag": f'"{digest}"'})
        return self.refuse(404, "EntryNotFound")

    def refuse(self, status: int, why: str = "", headers: dict[str, str] | None = None) -> None:
        """Answers as the hub does when it refuses: the reason stands in a header."""
        told = {"X-Error-Code": why, "X-Error-Message": why} if why else {}
        self.answer(json.dumps({"error": why}).encode(), status, told | (headers or {}))

    def answer(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None, cut: int = 0) -> None:
        """Sends the bytes, or the range of them that was asked for; with `cut`, ends the connection after so many."""
        start, given = 0, self.headers.get("Range", "")
        if status == 200 and given.startswith("bytes=") and given.endswith("-"):
            start, status = int(given[6:-1]), 206
            headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}", **(headers or {})}
        body = data[start:]
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut] if cut else body)

    def trickle(self, each: float) -> None:
        """Sends the head of an answer, then a byte every `each` seconds until the hub stops."""
        self.send_response(200)
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        while not self.hub.over.wait(each):
            try:
                self.wfile.write(b" ")
                self.wfile.flush()
            except OSError:
                return

    def log_message(self, *args: Any) -> None:
        """Says nothing on stderr."""


def _entry(file: str, data: bytes) -> dict[str, Any]:
    """A file in the answer to /tree/REVISION."""
    entry: dict[str, Any] = {"type": "file", "path": file, "size": len(data), "oid": _sha1(data)}
    if file.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def running() -> Iterator[Hub]:
    """A hub without models, until the block ends."""
    hub = Hub()
    hub.start()
    try:
        yield hub
    finally:
        hub.stop()


@contextmanager
def found(cache: Path) -> Iterator[Hub]:
    """A hub that this process's huggingface_hub finds, with an empty `cache`; it does not wait between attempts."""
    with running() as hub, ExitStack() as changes:
        hasty = SimpleNamespace(sleep=hub.waits.append)
        for name, value in {
            "constants.HF_HUB_CACHE": str(cache),
            "constants.ENDPOINT": hub.address,
            "constants.HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}",
            "constants.HF_HUB_OFFLINE": False,
            "utils._http.time": hasty,
            "file_download.time": hasty,
        }.items():
            changes.enter_context(patch(f"huggingface_hub.{name}", value))
        # transformers keeps the address of an earlier hub
        changes.enter_context(patch("transformers.utils.hub._hf_api", None, create=True))
        yield hub
