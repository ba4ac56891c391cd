"""Names of the hub: a local server answers as the hub does, and huggingface_hub reads its answers."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import Scan

from sinkscope import SinkscopeError
from sinkscope.checkpoints import open_checkpoint
from sinkscope.checkpoints.sources import find_source

COMMIT = "0123456789abcdef" * 2 + "01234567"
INDEX = "model.safetensors.index.json"

LISTED: dict[str, list[str]] = {
    "some/model": ["config.json", "model.safetensors"],
    "some/data": ["README.md", "model.safetensors"],
    "some/config": ["config.json"],
    "some/pickle": ["config.json", "pytorch_model.bin"],
    "gated/file": ["config.json", INDEX],
    "some/absent-file": ["config.json", INDEX],
}
"""Which files the hub lists of each repository."""


class Hub(BaseHTTPRequestHandler):
    """The hub's answers: the commit and the files of a repository, or the header that says why not."""

    def do_GET(self) -> None:
        name = "/".join(self.path.removeprefix("/api/models/").split("/")[:2])
        if self.path.startswith("/api/models/"):
            if "gated/model" in name:
                self._refuse(403, "GatedRepo")
            elif "/revision/none" in self.path:
                self._refuse(404, "RevisionNotFound")
            elif name not in LISTED:
                self._refuse(404, "RepoNotFound")
            else:
                files = [{"rfilename": file} for file in LISTED[name]]
                self._answer({"id": name, "sha": COMMIT, "siblings": files})
        elif self.path.endswith("config.json"):
            self._answer({"model_type": "llama"})
        elif self.path.startswith("/gated"):
            self._refuse(403, "GatedRepo")
        else:
            self._refuse(404, "EntryNotFound")

    do_HEAD = do_GET

    def _refuse(self, status: int, why: str) -> None:
        self._answer({"error": why}, status, {"X-Error-Code": why, "X-Error-Message": why})

    def _answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"X-Repo-Commit": COMMIT, "ETag": '"0"', **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Says nothing on stderr."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hub's address is that of a local server, and its cache is empty."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    yield
    server.shutdown()
    thread.join()
    server.server_close()


REFUSED: dict[str, str] = {
    "gated/model": "gated/model is gated: ask for access on its page",
    "gated/file": "gated/file is gated: ask for access on its page",
    "some/nonesuch": "no model 'some/nonesuch' on the hub, and no such folder",
    "some/data": "some/data holds no config.json: not a transformers model",
    "some/config": "some/config holds no weights",
    "some/pickle": "some/pickle has pickled weights only",
    "some/absent-file": f"cannot download {INDEX} of some/absent-file",
    "-some-/model": "'-some-/model' is neither a folder, a .gguf file nor a hub id",
}


@pytest.mark.enable_socket
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_hub_refuses_is_one_line(name: str, hub: None) -> None:
    with pytest.raises(SinkscopeError) as refused:
        find_source(name)
    assert str(refused.value).startswith(REFUSED[name])
    assert "\n" not in str(refused.value)


@pytest.mark.enable_socket
def test_a_name_is_resolved_to_one_commit(hub: None) -> None:
    source = find_source("some/model")
    assert (source.revision, source.weights, source.pickled) == (COMMIT, ("model.safetensors",), False)
    assert find_source("some/pickle", allow_pickle=True).pickled
    with pytest.raises(SinkscopeError, match="some/model has no revision 'none'"):
        find_source("some/model", "none")


def test_a_model_in_the_hub_s_cache_is_read_from_there(
    tiny_folder: Path, tmp_path: Path, scan_cli: Scan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the hub, and with the hash of the files that the cache holds."""
    repository = tmp_path / "hub" / "models--some--tiny"
    shutil.copytree(tiny_folder, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT, "utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    facts = open_checkpoint("some/tiny").facts
    assert facts["revision"] == COMMIT
    assert facts["weights_sha256"] == open_checkpoint(str(tiny_folder)).facts["weights_sha256"]
    outcome = scan_cli("some/tiny")
    assert outcome.code == 0, outcome.stderr
