"""Models of the hub: a whole hub on this machine answers huggingface_hub, and misbehaves where a test says so."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha1, sha256
from pathlib import Path
from typing import Any

import pytest
from conftest import TABLES, Refused, Scan
from hub import Answer, Files, Hub, files_of, found, running
from huggingface_hub import snapshot_download
from tiers import nightly, slow_but

from sinkscope import SinkscopeError
from sinkscope.checkpoints import Checkpoint, LoadOptions, open_checkpoint
from sinkscope.checkpoints.downloads import WORKER, Transfer
from sinkscope.checkpoints.sources import find_source

COMMIT = "0123456789abcdef" * 2 + "01234567"
NAME, INDEX, WEIGHTS = "some/model", "model.safetensors.index.json", "model.safetensors"
DESCRIBED = f"/api/models/{NAME}"


@pytest.fixture(scope="module")
def files(tiny_folder: Path) -> Files:
    """A real checkpoint, whose weights are one file."""
    return files_of(tiny_folder)


@pytest.fixture(scope="module")
def sharded(tiny_folder: Path, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The same checkpoint in several files."""
    folder = tmp_path_factory.mktemp("sharded")
    shutil.copytree(tiny_folder, folder, dirs_exist_ok=True)
    (folder / WEIGHTS).unlink()
    tiny_model.save_pretrained(folder, max_shard_size="100KB")
    found = files_of(folder)
    assert INDEX in found
    assert sum(name.endswith(".safetensors") for name in found) > 2
    return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an empty cache of the hub's models keeps this one."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models--some--model"


@pytest.fixture
def hub(cache: Path) -> Iterator[Hub]:
    with found(cache.parent) as hub:
        yield hub


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Sets what HF_HUB_OFFLINE=1 sets."""
    return lambda: monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def opened(revision: str | None = None, name: str = NAME, **options: Any) -> Checkpoint:
    return open_checkpoint(name, LoadOptions(revision=revision, device="cpu"), **options)


def refusal(revision: str | None = None, name: str = NAME) -> str:
    """The one line that loading a model is refused with."""
    with pytest.raises(SinkscopeError) as refused:
        opened(revision, name)
    line = str(refused.value)
    assert "\n" not in line
    assert len(line) < 500
    return line


def trick(
    path: str, play: Callable[[Answer], Any], method: str = "GET", times: int = 10**9
) -> Callable[[Answer], bool]:
    """Answers requests whose path holds `path` by `play`, as often as said."""
    left = [times]

    def answers(request: Answer) -> bool:
        if request.command != method or path not in request.route or not left[0]:
            return False
        left[0] -= 1
        play(request)
        return True

    return answers


def whole(cache: Path) -> bool:
    """Whether all that the cache holds of a model is whole: each blob has the name that its content gives it.

    huggingface_hub 1 keeps what is not, under a name that says so, to go on from there.
    """
    blobs = [each for each in files_of(cache / "blobs").items() if not each[0].endswith(".incomplete")]
    return all(name in (sha1(data).hexdigest(), sha256(data).hexdigest()) for name, data in blobs)


# What the hub does not have


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
CONFIG: Files = {"config.json": b'{"model_type": "llama"}'}


@pytest.fixture
def unfit(hub: Hub) -> Hub:
    """Repositories that hold no model that can be measured."""
    hub.add("gated/model", CONFIG)
    hub.add("gated/file", CONFIG | {INDEX: b"{}"})
    hub.repositories["gated/file"].hidden.add(INDEX)
    hub.add("some/data", {"README.md": b"", WEIGHTS: b""})
    hub.add("some/config", CONFIG)
    hub.add("some/pickle", CONFIG | {"pytorch_model.bin": b""})
    hub.add("some/absent-file", CONFIG | {INDEX: b"{}"})
    hub.tricks.append(trick("gated/model", lambda request: request.refuse(403, "GatedRepo")))
    (commit,) = hub.repositories["some/absent-file"].commits
    absent = f"/some/absent-file/resolve/{commit}/{INDEX}"
    hub.tricks.append(trick(absent, lambda request: request.refuse(404, "EntryNotFound"), "HEAD"))
    return hub


@pytest.mark.enable_socket
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_hub_refuses_is_one_line(name: str, unfit: Hub) -> None:
    with pytest.raises(SinkscopeError) as refused:
        find_source(name)
    assert str(refused.value).startswith(REFUSED[name])
    assert "\n" not in str(refused.value)


@pytest.mark.enable_socket
def test_a_name_is_resolved_to_one_commit(unfit: Hub, files: Files) -> None:
    commit = unfit.add(NAME, files)
    source = find_source(NAME)
    assert (source.revision, source.weights, source.pickled) == (commit, (WEIGHTS,), False)
    assert find_source("some/pickle", allow_pickle=True).pickled
    with pytest.raises(SinkscopeError, match="some/model has no revision 'none'"):
        find_source(NAME, "none")


@pytest.mark.enable_socket
@pytest.mark.parametrize("told", [None, "main", "../../../elsewhere"])
def test_a_hub_that_names_no_commit_is_refused(told: str | None, hub: Hub, files: Files) -> None:
    """The files would come from whatever the branch is at each moment."""
    hub.add(NAME, files)
    body = json.dumps({"id": NAME, "sha": told, "siblings": [{"rfilename": name} for name in files]}).encode()
    hub.tricks.append(trick(DESCRIBED, lambda request: request.answer(body)))
    assert "names no commit of some/model" in refusal()


# With the hub, then without


@pytest.mark.enable_socket
@pytest.mark.parametrize(
    "revision", slow_but([None, "main", "v1", "refs/pr/2", "commit", "short"], None, "v1", "short")
)
def test_what_was_scanned_once_is_read_without_the_hub(
    revision: str | None, hub: Hub, files: Files, offline: Callable[[], None]
) -> None:
    commit = hub.add(NAME, files, "main", "v1", "refs/pr/2")
    asked = {"commit": commit, "short": commit[:8]}.get(revision or "", revision)
    first = opened(asked)
    assert first.facts["revision"] == commit
    hub.stop()
    gone = opened(asked)
    offline()
    assert opened(asked).facts == gone.facts == first.facts
    assert gone.warnings == []


@pytest.mark.slow
@pytest.mark.enable_socket
def test_the_tables_are_the_same_without_the_hub(
    hub: Hub, sharded: Files, offline: Callable[[], None], scan_cli: Scan
) -> None:
    commit = hub.add(NAME, sharded)
    runs = [scan_cli(NAME, name="online")]
    offline()
    runs.append(scan_cli(NAME, name="offline"))
    for run in runs:
        assert run.code == 0, run.stderr
        assert run.warnings == []
        assert run.json("manifest")["model"]["revision"] == commit
    for table in TABLES:
        assert len({(run.folder / table).read_bytes() for run in runs}) == 1, table


@pytest.mark.enable_socket
def test_a_hub_that_goes_down_while_the_model_is_loaded_is_not_missed(hub: Hub, sharded: Files) -> None:
    """Its description is the last thing that is asked for where the files are there: nothing is tried again."""
    hub.add(NAME, sharded)
    first = opened()
    count = len(hub.asked)
    describe = Answer._describe

    def last_words(request: Answer) -> None:
        describe(request, NAME.split("/"))
        hub.stop()

    hub.tricks.append(trick(DESCRIBED, last_words))
    assert opened().facts == first.facts
    assert hub.asked[count:] == [("GET", DESCRIBED)]
    assert hub.waits == []


@pytest.mark.enable_socket
def test_a_hub_that_goes_down_before_all_is_there(hub: Hub, sharded: Files, cache: Path) -> None:
    """The cache does not take what is there for a model. Several files come at a time: any of them may be named."""
    hub.add(NAME, sharded)
    last = next(name for name in sharded if "00002-of" in name)
    hub.tricks.append(trick(last, lambda request: hub.stop(), "HEAD"))
    assert refusal().startswith("cannot download ")
    assert whole(cache)
    assert not (cache / "refs").exists()
    assert "holds only a part of some/model" in refusal(), "the hub is still gone"


CODE = b"""
from transformers import LlamaConfig, LlamaModel
class Config(LlamaConfig):
    model_type = "mystery"
class Model(LlamaModel):
    config_class = Config
"""


@pytest.mark.enable_socket
def test_code_of_a_hub_model_is_read_without_the_hub_too(
    hub: Hub, files: Files, offline: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code may need other repositories: it is loaded with the hub while that is there. Without leave it never is."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    names = {"AutoConfig": "modeling_mystery.Config", "AutoModel": "modeling_mystery.Model"}
    config = json.dumps(json.loads(files["config.json"]) | {"model_type": "mystery", "auto_map": names})
    commit = hub.add(NAME, files | {"config.json": config.encode(), "modeling_mystery.py": CODE})
    assert "--trust-remote-code" in refusal()
    first = open_checkpoint(NAME, LoadOptions(trust_remote_code=True))
    assert (first.facts["class"], first.facts["revision"]) == ("Model", commit)
    hub.stop()
    assert open_checkpoint(NAME, LoadOptions(trust_remote_code=True)).facts == first.facts
    offline()
    assert open_checkpoint(NAME, LoadOptions(trust_remote_code=True)).facts == first.facts
    assert "--trust-remote-code" in refusal()
    assert hub.waits == []


@pytest.mark.enable_socket
def test_all_that_a_processor_reads_is_fetched_too(hub: Hub, files: Files, cache: Path) -> None:
    """A scan of pictures reads it after the model; on a machine without a network it must be there."""
    more = {"preprocessor_config.json": b"{}", "additional_chat_templates/tool_use.jinja": b"{{ messages }}"}
    commit = hub.add(NAME, files | more | {"README.md": b"#", "model.onnx": b"0", ".gitattributes": b""})
    origin = opened().origin
    snapshot = cache / "snapshots" / commit
    assert files_of(snapshot) == files | more
    assert origin == {
        "pretrained_model_name_or_path": NAME, "revision": commit, "trust_remote_code": False, "local_files_only": True
    }  # fmt: skip


@pytest.mark.enable_socket
def test_a_branch_that_moved_is_known_by_its_last_whole_download(
    hub: Hub, files: Files, sharded: Files, offline: Callable[[], None]
) -> None:
    first = hub.add(NAME, files)
    opened()
    second = hub.add(NAME, sharded)
    hub.tricks.append(trick("-of-", lambda request: request.refuse(500), "HEAD"))
    refusal()
    assert find_source(NAME).revision == second, "the hub is asked first"
    hub.tricks.clear()
    hub.stop()
    assert opened().facts["revision"] == first
    offline()
    assert opened().facts["revision"] == first


# What the cache holds already


def test_a_model_in_the_hub_s_cache_is_read_from_there(
    tiny_folder: Path, cache: Path, scan_cli: Scan, offline: Callable[[], None]
) -> None:
    """Without the hub, and with the hash of the files that the cache holds."""
    offline()
    shutil.copytree(tiny_folder, cache / "snapshots" / COMMIT)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT, "utf-8")
    facts = open_checkpoint(NAME).facts
    assert facts["revision"] == COMMIT
    assert facts["weights_sha256"] == open_checkpoint(str(tiny_folder)).facts["weights_sha256"]
    outcome = scan_cli(NAME)
    assert outcome.code == 0, outcome.stderr


@pytest.mark.enable_socket
@pytest.mark.parametrize("revision", slow_but([None, "v1", "commit"], "v1"))
def test_what_huggingface_hub_downloaded_is_read(
    revision: str | None, hub: Hub, sharded: Files, offline: Callable[[], None], cache: Path
) -> None:
    """Its layout is what hub_cache.py reads and writes, so this test stands for what it relies on."""
    commit = hub.add(NAME, sharded, "main", "v1")
    asked = commit if revision == "commit" else revision
    snapshot_download(NAME, revision=asked)
    refs = files_of(cache / "refs") if asked != commit else {}
    assert set(refs.values()) <= {commit.encode()}
    online = opened(asked)
    assert hub.gets("/storage/") == 0
    assert asked == commit or files_of(cache / "refs") == refs
    hub.stop()
    offline()
    assert opened(asked).facts == online.facts


@pytest.mark.enable_socket
@pytest.mark.parametrize("revision", slow_but(["main", "refs/pr/2"], "refs/pr/2"))
def test_a_name_is_remembered_as_huggingface_hub_does_it(
    revision: str, hub: Hub, files: Files, cache: Path, tmp_path: Path
) -> None:
    hub.add(NAME, files, "main", "refs/pr/2")
    opened(revision)
    snapshot_download(NAME, revision=revision, cache_dir=tmp_path / "other")
    assert files_of(cache / "refs") == files_of(tmp_path / "other" / cache.name / "refs")


def held(cache: Path, folder: Path, *commits: str, **refs: str) -> None:
    """A cache that holds commits of a model."""
    for commit in commits:
        shutil.copytree(folder, cache / "snapshots" / commit)
    for revision, commit in refs.items():
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / revision).write_text(commit, "utf-8")


def test_a_cache_without_refs_that_holds_one_commit(
    tiny_folder: Path, cache: Path, offline: Callable[[], None]
) -> None:
    """As 0.1 left it. The commit is read, with a warning: it may have been asked for by another name."""
    offline()
    held(cache, tiny_folder, COMMIT)
    checkpoint = opened()
    assert checkpoint.facts["revision"] == COMMIT
    (warning,) = checkpoint.warnings
    assert COMMIT in warning
    assert opened(COMMIT[:8]).facts == opened(COMMIT).facts == checkpoint.facts
    assert opened(COMMIT[:8]).warnings == []


OTHER = COMMIT[::-1]


@pytest.mark.parametrize("revision", [None, "main", "v1", "0" * 8, "0" * 40])
def test_a_cache_that_does_not_say_which_commit_is_meant(
    revision: str | None, tiny_folder: Path, cache: Path, offline: Callable[[], None]
) -> None:
    """A commit is never taken for a branch that another name of it leaves open."""
    offline()
    held(cache, tiny_folder, COMMIT, OTHER)
    line = refusal(revision)
    assert COMMIT in line
    assert OTHER in line
    assert "--revision" in line


def test_the_commit_of_a_tag_is_not_taken_for_the_main_branch(
    tiny_folder: Path, cache: Path, offline: Callable[[], None]
) -> None:
    offline()
    held(cache, tiny_folder, COMMIT, v1=COMMIT)
    assert opened("v1").facts["revision"] == COMMIT
    assert "does not say which commit its main branch is" in refusal()


@pytest.mark.parametrize("lacking", ["config.json", WEIGHTS, INDEX])
def test_a_cache_that_holds_a_part(
    lacking: str, tiny_folder: Path, cache: Path, sharded: Files, offline: Callable[[], None]
) -> None:
    """As other programs leave it that only read a tokenizer."""
    offline()
    held(cache, tiny_folder, COMMIT, main=COMMIT)
    snapshot = cache / "snapshots" / COMMIT
    if lacking == INDEX:
        (snapshot / WEIGHTS).unlink()
        (snapshot / INDEX).write_bytes(sharded[INDEX])
    else:
        (snapshot / lacking).unlink()
    line = refusal()
    assert f"holds only a part of some/model at {COMMIT}" in line
    assert "hf download some/model" in line


def test_a_revision_leads_nowhere_outside_of_the_cache(
    tiny_folder: Path, cache: Path, offline: Callable[[], None]
) -> None:
    offline()
    held(cache, tiny_folder, COMMIT, OTHER)
    (cache / "elsewhere").write_text(COMMIT, "utf-8")
    assert "does not say which commit" in refusal("../elsewhere")
    assert "does not say which commit" in refusal(str(cache / "elsewhere"))


@pytest.mark.enable_socket
def test_a_cache_in_which_no_name_can_be_noted(hub: Hub, files: Files, cache: Path) -> None:
    """The scan does without, as huggingface_hub does."""
    commit = hub.add(NAME, files)
    cache.mkdir(parents=True)
    (cache / "refs").write_text("", "utf-8")
    assert opened().facts["revision"] == commit


@pytest.mark.enable_socket
def test_a_file_that_was_cut_in_the_cache(hub: Hub, files: Files, cache: Path) -> None:
    """As a full disk may leave it: the hub's size of the file is held against it."""
    commit = hub.add(NAME, files)
    opened()
    weights = cache / "snapshots" / commit / WEIGHTS
    weights.resolve().write_bytes(files[WEIGHTS][:-100])
    line = refusal()
    assert f"{len(files[WEIGHTS]) - 100} bytes" in line
    assert "delete it" in line


# While files come


@pytest.mark.enable_socket
def test_a_download_tells_how_far_it_is(hub: Hub, sharded: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 2**14)
    monkeypatch.setattr("sinkscope.checkpoints.hub.AT_ONCE", 1)  # so that the calls come in the order of the bytes
    hub.add(NAME, sharded)
    told: list[tuple[str, int, int]] = []
    opened(report=lambda *each: told.append(each))
    counts = [done for stage, done, total in told if stage == "downloading" and total]
    total = sum(len(data) for name, data in sharded.items() if name not in ("config.json", INDEX))  # they came before
    assert {of for stage, _, of in told if stage == "downloading"} == {total}
    assert counts == sorted(counts)
    assert counts[-1] == total
    assert len(counts) > total // 2**14
    told.clear()
    opened(report=lambda *each: told.append(each))
    assert {stage for stage, _, _ in told} == {"loading"}, "nothing is left to download"


@pytest.mark.enable_socket
def test_a_line_that_is_cut(
    hub: Hub, files: Files, cache: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The download goes on where the line was cut: at once, or, with huggingface_hub 1, in the next scan."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 2**14)
    hub.add(NAME, files)

    cut = 3 * 2**14 + 100
    hub.tricks.append(trick("/storage/", lambda request: request.answer(files[WEIGHTS], cut=cut), times=1))
    with suppress(SinkscopeError):
        opened()
    checkpoint = opened()
    assert hub.ranges == [f"bytes={3 * 2**14}-"]
    assert whole(cache)
    assert checkpoint.facts["weights_sha256"] == open_checkpoint(str(tiny_folder)).facts["weights_sha256"]


@pytest.mark.enable_socket
@pytest.mark.parametrize("cut", [2**14, 0])
def test_a_file_of_the_wrong_size(cut: int, hub: Hub, files: Files, cache: Path) -> None:
    """Shorter than the hub says, and longer."""
    hub.add(NAME, files)
    data = files[WEIGHTS][:cut] if cut else files[WEIGHTS] * 2
    hub.tricks.append(trick("/storage/", lambda request: request.answer(data)))
    line = refusal()
    assert line.startswith(f"cannot download {WEIGHTS} of some/model: Consistency check failed")
    assert not (cache / "refs").exists()
    assert not list((cache / "snapshots").rglob(WEIGHTS))


STATUSES = {401: "hf auth login", 403: "hf auth login", 404: "nothing of that name", 503: "try again later"}


@pytest.mark.enable_socket
@pytest.mark.parametrize(
    ("status", "where"),
    slow_but(
        [(status, where) for status in STATUSES for where in ("description", "facts", "bytes")],
        *[(401, "description"), (503, "description"), (403, "facts"), (404, "bytes")],
    ),
)
def test_a_status_is_told_with_what_to_do(
    status: int, where: str, hub: Hub, files: Files, cache: Path, refused: Refused
) -> None:
    """Nothing is left behind, neither in the results nor half in the cache."""
    hub.add(NAME, files)
    if where == "description":
        hub.tricks.append(trick(DESCRIBED, lambda request: request.refuse(status)))
    elif where == "facts":
        hub.tricks.append(trick(WEIGHTS, lambda request: request.refuse(status), "HEAD"))
    else:
        hub.tricks.append(trick("/storage/", lambda request: request.refuse(status)))
    line = refused(NAME)
    assert f"the hub answers {status}: " in line
    assert STATUSES[status] in line
    assert ("neither a folder nor in its cache" in line) == (where == "description")
    assert (f"cannot download {WEIGHTS} of {NAME}" in line) == (where != "description")
    assert not (cache / "refs").exists()
    assert whole(cache)


@pytest.mark.enable_socket
@pytest.mark.parametrize("status", [401, 503])
def test_a_hub_that_refuses_what_the_cache_holds(status: int, hub: Hub, files: Files) -> None:
    """A token that has run out, or a hub that is being mended, keeps nobody from what was downloaded."""
    hub.add(NAME, files)
    first = opened()
    hub.tricks.append(trick(DESCRIBED, lambda request: request.refuse(status)))
    assert opened().facts == first.facts


@pytest.mark.enable_socket
@pytest.mark.parametrize("file", [WEIGHTS, "tokenizer.json"])
def test_a_gated_file_of_an_open_repository(file: str, hub: Hub, files: Files, refused: Refused) -> None:
    """A model without its tokenizer would be another one."""
    hub.add(NAME, files)
    hub.repositories[NAME].hidden.add(file)
    assert refused(NAME).startswith("some/model is gated: ask for access on its page")


# A hub that cannot be trusted


@pytest.mark.enable_socket
@pytest.mark.parametrize("file", [WEIGHTS, "config.json"])
def test_a_redirect_to_a_file_of_this_machine_is_not_followed(
    file: str, hub: Hub, files: Files, cache: Path, tmp_path: Path
) -> None:
    hub.add(NAME, files)
    secret = tmp_path / "secret"
    secret.write_bytes(files[file])  # what the hub says of size and content even fits

    def elsewhere(request: Answer) -> None:
        facts = {"X-Repo-Commit": next(iter(hub.repositories[NAME].commits)), "ETag": '"secret"'}
        request.answer(b"", 302, facts | {"Location": secret.as_uri(), "X-Linked-Size": str(len(files[file]))})

    hub.tricks.append(trick(file, elsewhere, "HEAD"))
    assert refusal().startswith(f"cannot download {file} of some/model: ")
    assert not list((cache / "snapshots").rglob(file))


@pytest.mark.enable_socket
def test_a_description_is_not_read_from_this_machine(hub: Hub, tmp_path: Path) -> None:
    told = tmp_path / "told"
    told.write_text("{}", "utf-8")
    hub.tricks.append(trick(DESCRIBED, lambda request: request.answer(b"", 302, {"Location": told.as_uri()})))
    assert "cannot be reached (Request URL " in refusal()


@pytest.mark.enable_socket
def test_a_redirect_to_another_host_is_followed_without_the_token(
    hub: Hub, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As to the storage, where all large files lie."""
    hub.add(NAME, files)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    seen: list[tuple[str, bool]] = []
    hub.tricks.append(lambda request: bool(seen.append((request.route, "authorization" in request.headers))))
    opened()
    assert {"/storage/" in route for route, _ in seen} == {True, False}
    assert all(given == ("/storage/" not in route) for route, given in seen)


HOSTILE = (
    "../x.json", "../../refs/main.json", "/etc/x.json", "a\\x.json", "..\\x.json", "C:x.json", "sub/x.json",
    "additional_chat_templates/../../x.jinja", "x\0.json", "",
)  # fmt: skip


@pytest.mark.enable_socket
def test_names_that_lead_elsewhere_are_not_asked_for(hub: Hub, files: Files, cache: Path) -> None:
    commit = hub.add(NAME, files)
    body = json.dumps(
        {"id": NAME, "sha": commit, "siblings": [{"rfilename": name} for name in (*HOSTILE, *files)]}
    ).encode()
    hub.tricks.append(trick(DESCRIBED, lambda request: request.answer(body)))
    assert opened().facts["revision"] == commit
    assert not [path for _, path in hub.asked if "x.json" in path or "x.jinja" in path or "refs" in path]
    assert set(files_of(cache / "snapshots" / commit)) == set(files)
    assert {path.name for path in cache.parent.iterdir()} <= {cache.name, ".locks", "CACHEDIR.TAG"}


@pytest.mark.slow
@pytest.mark.enable_socket
@pytest.mark.parametrize("told", [True, False])
def test_a_configuration_that_unpacks_into_far_more(
    told: bool, hub: Hub, files: Files, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MB out of 64 kB: the download ends before, with the hub's word for the size and without."""
    hub.add(NAME, files)
    monkeypatch.setattr("sinkscope.checkpoints.hub.MOST_SETTINGS", 2**24)
    packed = gzip.compress(bytes(2**26), 1)

    def bomb(request: Answer) -> None:
        request.send_response(200)
        commit = next(iter(hub.repositories[NAME].commits))
        for key, value in {"X-Repo-Commit": commit, "ETag": '"bomb"', "Content-Encoding": "gzip"}.items():
            request.send_header(key, value)
        if request.command == "GET":
            request.send_header("Content-Length", str(len(packed)))
        elif told:
            request.send_header("X-Linked-Size", "600")
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(packed)

    for method in ("HEAD", "GET"):
        hub.tricks.append(trick("config.json", bomb, method))
    line = refusal()
    untold = "does not have a Content-Length" in line  # huggingface_hub 1 asks no further then
    assert "the hub sends more of config.json than" in line or (untold and not told)
    assert sum(map(len, files_of(cache / "blobs").values())) <= 3 * 2**24


@pytest.mark.slow
@pytest.mark.enable_socket
@pytest.mark.parametrize("packed", [True, False])
def test_a_description_without_end_is_not_read_to_it(
    packed: bool, hub: Hub, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MB of JSON, packed into 64 kB or as they are: it is left after the most that a description may have."""
    hub.add(NAME, files)
    monkeypatch.setattr("sinkscope.checkpoints.hub.LONGEST", 2**20)
    plain = b'{"siblings": [' + b" " * 2**26 + b"]}"
    sent: list[int] = []

    def endless(request: Answer) -> None:
        body = gzip.compress(plain, 1) if packed else plain
        request.send_response(200)
        for key, value in ({"Content-Encoding": "gzip"} if packed else {}).items():
            request.send_header(key, value)
        request.end_headers()
        for start in range(0, len(body), 2**16):
            request.wfile.write(body[start : start + 2**16])
            sent.append(start)

    hub.tricks.append(trick(DESCRIBED, endless))
    assert refusal() == f"the hub's description of {NAME} is longer than any model's: it was not read to the end"
    assert packed or len(sent) < 2**10, "the connection was closed before all was sent"


@pytest.mark.enable_socket
def test_an_index_that_unpacks_into_far_more(
    hub: Hub, sharded: Files, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, sharded)
    monkeypatch.setattr("sinkscope.checkpoints.hub.MOST_SETTINGS", 2**24)
    packed = gzip.compress(bytes(2**26), 1)
    hub.tricks.append(
        trick(INDEX, lambda request: request.answer(packed, headers={"Content-Encoding": "gzip"}))
    )  # fmt: skip
    assert f"the hub sends more of {INDEX} than" in refusal()
    assert sum(map(len, files_of(cache / "blobs").values())) <= 3 * 2**24


def offering_xet(hub: Hub, told: dict[str, str] | None = None) -> None:
    """Has the hub offer its large files in pieces, by a service that `told` names; it names none by default."""
    route = f"{hub.address}/api/models/{NAME}/xet-read-token/x"

    def offered(request: Answer) -> None:
        answer, more = request.answer, {"X-Xet-Hash": "0" * 64, "X-Xet-Refresh-Route": route}
        request.answer = lambda *args: answer(*args[:2], {**args[2], **more})  # type: ignore[method-assign]

    def offers(request: Answer) -> bool:
        if request.command == "HEAD" and request.route.endswith(".safetensors"):
            offered(request)
        return False

    def token(request: Answer) -> None:
        request.answer(b"{}", headers=told) if told else request.refuse(404, "RepoNotFound")

    hub.tricks += [offers, trick("xet-read-token", token)]


@pytest.mark.enable_socket
def test_a_hub_that_offers_pieces_is_read_without_the_package_for_them(
    hub: Hub, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface_hub then asks for the file as a whole."""
    commit = hub.add(NAME, files)
    offering_xet(hub)
    monkeypatch.setattr("huggingface_hub.file_download.is_xet_available", lambda: False)
    assert opened().facts["revision"] == commit
    assert not any("xet-read-token" in path for _, path in hub.asked)


@pytest.mark.slow
@pytest.mark.enable_socket
@pytest.mark.parametrize("service", ["none", "gone", "empty"])
def test_a_service_of_pieces_that_gives_none_is_one_line(
    service: str, hub: Hub, files: Files, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the package for them: the hub names no service, one that is not there, or one that has no such file."""
    pytest.importorskip("hf_xet")
    hub.add(NAME, files)
    address = {"none": "", "gone": "http://127.0.0.1:9", "empty": hub.storage}[service]
    facts = {"X-Xet-Cas-Url": address, "X-Xet-Access-Token": "x", "X-Xet-Token-Expiration": "9" * 10}
    offering_xet(hub, facts if address else None)
    monkeypatch.setattr("huggingface_hub.file_download.is_xet_available", lambda: True)
    monkeypatch.setenv("SINKSCOPE_HUB_TIMEOUT", "3")
    line = refusal()  # hf_xet asks a service that is gone again and again, until sinkscope gives it up
    assert f"{WEIGHTS} of {NAME}" in line or "has sent next to nothing for 3 s" in line
    assert any("xet-read-token" in path for _, path in hub.asked)
    assert whole(cache)
    assert not (cache / "refs").exists()


@pytest.mark.enable_socket
@pytest.mark.parametrize("where", slow_but(["config.json", INDEX, WEIGHTS, DESCRIBED], WEIGHTS))
def test_a_trickle_without_end_is_given_up(
    where: str, hub: Hub, files: Files, sharded: Files, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes soon enough for huggingface_hub's own limit, which is for one piece."""
    hub.add(NAME, sharded if where == INDEX else files)
    monkeypatch.setenv("SINKSCOPE_HUB_TIMEOUT", "0.5")
    path = "/storage/" if where == WEIGHTS else where
    hub.tricks.append(trick(path, lambda request: request.trickle(0.02)))
    line = refusal()
    assert "the model hub has sent next to nothing for 0.5 s" in line
    assert "SINKSCOPE_HUB_TIMEOUT=SECONDS" in line
    assert ("neither a folder nor in its cache" in line) == (where == DESCRIBED)
    assert not (cache / "refs").exists()


@pytest.mark.enable_socket
def test_a_download_that_is_interrupted_leaves_nothing(
    hub: Hub, files: Files, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C in the thread that waits. huggingface_hub 1 keeps its one part of the file, to go on from there."""
    hub.add(NAME, files)
    begun, others = threading.Event(), {*threading.enumerate()}  # those of other tests may wait for their servers
    hub.tricks.append(trick("/storage/", lambda request: (begun.set(), request.trickle(0.02))))

    def interrupted(self: Transfer) -> None:
        if begun.is_set():
            raise KeyboardInterrupt

    monkeypatch.setattr(Transfer, "_check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opened()
    assert begun.is_set()
    for thread in {*threading.enumerate()} - others:
        if thread.name == WORKER:  # on a busy machine it takes longer to clear up than it is waited for
            thread.join(30)
    assert not (cache / "refs").exists()
    assert not list((cache / "blobs").glob("*.????????.incomplete"))
    assert whole(cache)


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_none(given: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINKSCOPE_HUB_TIMEOUT", given)
    assert refusal() == f"SINKSCOPE_HUB_TIMEOUT={given} is not a number of seconds above 0"


# One commit


@pytest.mark.enable_socket
@pytest.mark.parametrize("file", slow_but(["config.json", INDEX, "00002-of"], "config.json", "00002-of"))
def test_a_branch_that_moves_between_two_files(file: str, hub: Hub, sharded: Files, files: Files, cache: Path) -> None:
    first = hub.add(NAME, sharded)
    moved: list[str] = []

    def move(request: Answer) -> bool:
        if file in request.route and not moved:
            moved.append(hub.add(NAME, files | {"config.json": b"{}"}))
        return False

    hub.tricks.append(move)
    assert opened().facts["revision"] == first
    assert moved
    assert files_of(cache / "snapshots" / first) == sharded
    assert (cache / "refs" / "main").read_text("utf-8") == first


@pytest.mark.enable_socket
def test_a_file_of_another_commit_than_was_asked_for_is_refused(hub: Hub, files: Files, cache: Path) -> None:
    """As a mirror gives it that knows branches only."""
    commit = hub.add(NAME, files)

    def other(request: Answer) -> None:
        data = files["tokenizer.json"]
        request.answer(data, headers={"X-Repo-Commit": COMMIT, "ETag": '"0"'})

    for method in ("HEAD", "GET"):
        hub.tricks.append(trick("tokenizer.json", other, method))
    line = refusal()
    assert f"from commit {COMMIT}" in line
    assert commit in line
    assert not (cache / "refs" / "main").exists()
    hub.stop()
    assert COMMIT not in refusal(commit), "huggingface_hub itself takes the one for the other now"


# Processes, with the environment that people set


def scan_in_process(environment: dict[str, str], folder: Path, *words: str) -> subprocess.Popen[str]:
    short = ("--seq-len", "32", "--num-sequences", "2", "--out", str(folder))
    return subprocess.Popen(
        [sys.executable, "-m", "sinkscope", "scan", NAME, *short, *words],
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finished(process: subprocess.Popen[str], folder: Path) -> str:
    """The commit that a scan has measured."""
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert "warning" not in stderr
    return str(json.loads((folder / "manifest.json").read_text("utf-8"))["model"]["revision"])


@pytest.mark.slow
@nightly
@pytest.mark.enable_socket
def test_the_login_node_and_the_compute_node(files: Files, tmp_path: Path) -> None:
    """What docs/first-run.md says: a scan with a network, then the same with HF_HUB_OFFLINE=1, or with no hub there."""
    with running() as hub:
        commit = hub.add(NAME, files, "main", "v1")
        environment = hub.environment(tmp_path / "home")
        folders = [tmp_path / name for name in ("login", "compute", "gone", "login-v1", "compute-v1", "gone-v1")]
        for number, revision in ((0, ()), (3, ("--revision", "v1"))):
            login = scan_in_process(environment, folders[number], *revision)
            assert finished(login, folders[number]) == commit
            count = len(hub.asked)
            compute = scan_in_process(environment | {"HF_HUB_OFFLINE": "1"}, folders[number + 1], *revision)
            assert finished(compute, folders[number + 1]) == commit
            assert len(hub.asked) == count
    for number, revision in ((2, ()), (5, ("--revision", "v1"))):
        assert finished(scan_in_process(environment, folders[number], *revision), folders[number]) == commit
    for table in TABLES:
        assert len({(folder / table).read_bytes() for folder in folders}) == 1, table


@pytest.mark.slow
@pytest.mark.enable_socket
def test_two_scans_of_a_model_at_once(sharded: Files, tmp_path: Path) -> None:
    """They share a cache that is empty when both begin."""
    with running() as hub:
        commit = hub.add(NAME, sharded)
        environment = hub.environment(tmp_path / "home")
        folders = [tmp_path / "one", tmp_path / "other"]
        scans = [scan_in_process(environment, folder) for folder in folders]
        assert [finished(*each) for each in zip(scans, folders, strict=True)] == [commit, commit]
        cache = tmp_path / "home" / "hub" / "models--some--model"
        assert files_of(cache / "snapshots" / commit) == sharded
        assert files_of(cache / "refs") == {"main": commit.encode()}
        assert whole(cache)
    for table in TABLES:
        assert len({(folder / table).read_bytes() for folder in folders}) == 1, table
