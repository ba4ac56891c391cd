"""The files that weights come from: no pickle unasked, none outside the folder, all hashed, none changed midway."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Refused, make_model
from safetensors.torch import load_file, save_file
from transformers import CTRLTokenizer

from sinkscope import SinkscopeError, scan
from sinkscope.checkpoints import open_checkpoint, wrap_model
from sinkscope.checkpoints.sources import find_source

INDEX = "model.safetensors.index.json"
PART = "part.safetensors"
ELSEWHERE = ["part.bin", f"../{PART}", f"/{PART}", f"sub/{PART}", rf"sub\{PART}", ""]


def write_index(folder: Path, part: object) -> None:
    """Puts an index in the place of model.safetensors, which becomes a file that nothing names."""
    weights = folder / "model.safetensors"
    shards = dict.fromkeys(load_file(weights), part)
    weights.rename(folder / "dummy.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}), "utf-8")


def change_a_weight(file: Path) -> None:
    weights = load_file(file)
    weights["model.norm.weight"] += 1e-3
    save_file(weights, file, metadata={"format": "pt"})


def shards_of(folder: Path) -> list[Path]:
    """Splits model.safetensors into two files with an index."""
    weights = load_file(folder / "model.safetensors")
    names = {name: f"model-0000{1 + ('norm' in name)}-of-00002.safetensors" for name in weights}
    for part in set(names.values()):
        held = {name: weight for name, weight in weights.items() if names[name] == part}
        save_file(held, folder / part, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}), "utf-8")
    return sorted(folder / part for part in set(names.values()))


def sha256_of(folder: Path) -> Any:
    return open_checkpoint(str(folder)).facts["weights_sha256"]


@pytest.mark.parametrize("part", ELSEWHERE)
def test_an_index_that_names_a_pickle_or_a_file_elsewhere(part: str, copied: Path, refused: Refused) -> None:
    """The index of safetensors is no leave for a pickle, and weights elsewhere would stand in no hash."""
    write_index(copied, part)
    (copied / "sub").mkdir()
    weights = load_file(copied / "dummy.safetensors")
    torch.save(weights, copied / "part.bin")
    for folder in (copied.parent, copied / "sub"):
        save_file(weights, folder / PART, metadata={"format": "pt"})
    assert refused(copied).startswith(f"{copied}: {INDEX} names the weights {part!r}, which is no .safetensors file")


@pytest.mark.parametrize("name", ["adapter_model.bin", "sub/model.safetensors"])
def test_a_configuration_that_names_a_pickle_or_a_sub_folder(name: str, copied: Path, refused: Refused) -> None:
    config = copied / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"transformers_weights": name}), "utf-8")
    (copied / "sub").mkdir()
    shutil.copy(copied / "model.safetensors", copied / "sub")
    torch.save(load_file(copied / "model.safetensors"), copied / "adapter_model.bin")
    assert f"config.json names the weights {name!r}" in refused(copied)


@pytest.mark.parametrize("text", ["{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{", "[" * 100_000])
def test_a_damaged_index(text: str, copied: Path, refused: Refused) -> None:
    write_index(copied, "dummy.safetensors")
    (copied / INDEX).write_text(text, "utf-8")
    message = refused(copied)
    assert INDEX in message
    assert "is damaged" in message


@pytest.mark.parametrize("reachable", [True, False])
def test_an_index_of_the_hub_that_names_a_pickle(
    reachable: bool, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both with the hub's list of files and, out of its reach, with what its cache holds."""
    write_index(copied, "part.bin")
    commit = "0" * 40
    cache = tmp_path / "hub" / "models--some--model"
    snapshot = Path(shutil.copytree(copied, cache / "snapshots" / commit))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit, "utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    if reachable:
        files = [SimpleNamespace(rfilename=file.name) for file in copied.iterdir()]
        told = SimpleNamespace(siblings=files, sha=commit)
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: told)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda _, file, **__: str(snapshot / file))
    with pytest.raises(SinkscopeError, match=r"some/model: .* names the weights 'part\.bin'"):
        find_source("some/model")
    (snapshot / "dummy.safetensors").rename(snapshot / "model.safetensors")
    if not reachable:
        source = find_source("some/model")
        assert (source.weights, source.revision, source.pickled) == (("model.safetensors",), commit, False)


def test_an_adapter_that_peft_would_load(copied: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    (copied / "adapter_config.json").write_text("{}", "utf-8")
    monkeypatch.setattr("sinkscope.checkpoints.weight_files.find_spec", lambda _: True)
    assert "adapter_config.json" in refused(copied)


# The hash


def test_the_hash_is_of_the_files_that_the_index_names(copied: Path) -> None:
    parts = shards_of(copied)
    before = sha256_of(copied)
    save_file({"none": torch.zeros(1)}, copied / "stray.safetensors")
    assert sha256_of(copied) == before, "a file that is not loaded"
    change_a_weight(parts[1])
    assert sha256_of(copied) != before


def test_the_hash_leaves_out_an_index_that_is_not_used(tiny_folder: Path, copied: Path) -> None:
    """transformers loads model.safetensors where it exists."""
    (copied / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": "../b.bin"}}), "utf-8")
    assert sha256_of(copied) == sha256_of(tiny_folder)


def test_a_link_is_hashed_by_its_content(copied: Path, tmp_path: Path) -> None:
    """Only the hub's cache calls a file by its hash; anywhere else such a name says nothing."""
    target = tmp_path / ("0" * 64)
    (copied / "model.safetensors").rename(target)
    (copied / "model.safetensors").symlink_to(target)
    before = sha256_of(copied)
    change_a_weight(target)
    assert sha256_of(copied) != before


def test_a_snapshot_of_the_hub_is_hashed_by_its_name(copied: Path, tmp_path: Path, tiny_folder: Path) -> None:
    snapshot = Path(shutil.copytree(copied, tmp_path / "models--m" / "snapshots" / "0"))
    blob = tmp_path / "models--m" / "blobs" / ("0" * 64)
    blob.parent.mkdir()
    (snapshot / "model.safetensors").rename(blob)
    (snapshot / "model.safetensors").symlink_to(blob)
    before = sha256_of(snapshot)
    assert before != sha256_of(tiny_folder)
    change_a_weight(blob)
    assert sha256_of(snapshot) == before


def test_the_hash_of_the_tokenizer(copied: Path) -> None:
    facts = open_checkpoint(str(copied)).facts
    path = copied / "tokenizer.json"
    settings = json.loads(path.read_text("utf-8"))
    settings["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(settings), "utf-8")
    assert open_checkpoint(str(copied)).facts == facts, "each call of a tokenizer decides on truncation"
    settings["model"]["merges"].pop()
    path.write_text(json.dumps(settings), "utf-8")
    changed = open_checkpoint(str(copied)).facts
    assert {name for name in facts if facts[name] != changed[name]} == {"tokenizer_sha256"}


def test_the_hash_of_a_tokenizer_in_python(tmp_path: Path) -> None:
    """It has no serialisation: its vocabulary and the files that it writes are hashed."""
    (tmp_path / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate("ab")}), "utf-8")
    hashes = []
    for merges in ("a b", "b a"):
        (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", "utf-8")
        tokenizer = CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"), unk_token="a")
        hashes.append(wrap_model(make_model(), tokenizer).facts["tokenizer_sha256"])
    assert None not in hashes
    assert hashes[0] != hashes[1]
    assert wrap_model(make_model()).facts["tokenizer_sha256"] is None


# Files that cannot be read


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", INDEX, "pytorch_model.bin"])
def test_a_pipe_is_not_waited_for(name: str, copied: Path, refused: Refused) -> None:
    """Nothing is ever written into it."""
    if name.startswith("model-") or name == INDEX:
        shards_of(copied)
    (copied / "model.safetensors").unlink(missing_ok=True)
    (copied / name).unlink(missing_ok=True)
    os.mkfifo(copied / name)
    writer = os.open(copied / name, os.O_RDWR | os.O_NONBLOCK)  # nobody waits for a writer, and the test ends
    end = threading.Timer(5, os.close, [writer])
    end.start()
    message = refused(copied, "--allow-pickle")
    end.cancel()
    os.close(writer)
    assert message.startswith(f"{copied / name} is not a regular file")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_without_permission(name: str, copied: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """For root, who may read all files, the refusal is played."""
    (copied / name).chmod(0)
    if os.access(copied / name, os.R_OK):
        unlocked = Path.open

        def locked(path: Path, *args: Any, **kwargs: Any) -> Any:
            if path == copied / name:
                raise PermissionError(13, "Permission denied", str(path))
            return unlocked(path, *args, **kwargs)

        monkeypatch.setattr(Path, "open", locked)
    assert refused(copied) == f"cannot read {copied / name}: Permission denied"


# Files that change


@pytest.mark.parametrize("change", ["written over", "replaced"])
def test_weights_that_change_during_the_scan(change: str, copied: Path, tmp_path: Path) -> None:
    """On a CPU the model reads them from the file while it runs."""
    file, shards = copied / "model.safetensors", tmp_path / "shards"
    other = tmp_path / "other.safetensors"
    shutil.copy(file, other)
    change_a_weight(other)

    def progress(_: str, done: int, __: int) -> None:
        if done == 2:
            _ = other.rename(file) if change == "replaced" else file.write_bytes(other.read_bytes())

    with pytest.raises(SinkscopeError, match=r"model\.safetensors was changed during the scan"):
        scan(str(copied), seq_len=16, num_sequences=4, batch_size=1, progress=progress, shards=shards)
    kept = [path.name for path in shards.rglob("*.safetensors")]
    assert len(kept) == 2, "the batches before the change, and no other"


def test_weights_that_are_removed_during_the_scan(copied: Path) -> None:
    """The pages stay: the numbers are those of the model that was loaded."""

    def progress(_: str, done: int, __: int) -> None:
        if done == 1:
            (copied / "model.safetensors").unlink()

    asked: dict[str, Any] = {"seq_len": 16, "num_sequences": 2, "batch_size": 1}
    whole = scan(str(copied), **asked)
    assert scan(str(copied), **asked, progress=progress).heads.equals(whole.heads)
