"""Damaged files of every kind that a scan reads: each is refused in one line that names the file."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import make_tokenizer
from tiers import slow_but

from sinkscope import SinkscopeError
from sinkscope.inputs.documents import read_source
from sinkscope.inputs.images import PIXEL_LIMIT, read_folder
from sinkscope.inputs.rules import encode
from sinkscope.inputs.sound import read_wav

RATE = 16_000


def refusal(read: Callable[[], object], file: Path) -> str:
    """The line that says why the file is refused; it must name it, and be one line."""
    with pytest.raises(SinkscopeError) as caught:
        read()
    assert file.name in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def read_or_named(read: Callable[[], object], file: Path) -> bool:
    """Whether the file is read; where it is refused, the line must name it."""
    try:
        read()
    except SinkscopeError as error:
        if file.name not in str(error):
            raise
        return False
    return True


# Sound


def wav(form: int = 1, channels: int = 1, bits: int = 16, frames: int = 20, tail: bytes = b"") -> bytes:
    """A wav file of noise. `form`: 1 = integers, 3 = floats. `tail`: chunks after the sound."""
    width = channels * bits // 8
    sound = np.random.default_rng(0).integers(1, 60, frames * width, dtype=np.uint8).tobytes()
    head = struct.pack("<4sIHHIIHH", b"fmt ", 16, form, channels, RATE, RATE * width, width, bits)
    chunks = b"WAVE" + head + struct.pack("<4sI", b"data", len(sound)) + sound + tail
    return struct.pack("<4sI", b"RIFF", len(chunks)) + chunks


LIST = struct.pack("<4sI", b"LIST", 12) + b"INFOabcdefgh"
WAVS = {
    "bytes": wav(bits=8),
    "16 bits": wav(),
    "24 bits, stereo": wav(channels=2, bits=24),
    "32 bits": wav(bits=32),
    "floats": wav(form=3, bits=32),
    "with a list": wav(tail=LIST),
}


@pytest.mark.parametrize("kind", WAVS)
def test_a_wav_cut_anywhere_is_named(kind: str, tmp_path: Path) -> None:
    file, whole = tmp_path / "a.wav", WAVS[kind]
    file.write_bytes(whole)
    assert len(read_wav(file, RATE)) == 20
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        refusal(lambda: read_wav(file, RATE), file)


def test_a_wav_cut_short_of_its_length_says_so(tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    file.write_bytes(wav(frames=1000)[:1000])
    assert "cut short" in refusal(lambda: read_wav(file, RATE), file)
    file.write_bytes(wav(frames=1000).replace(struct.pack("<I", 2000), struct.pack("<I", 4000)))
    assert "cut short" in refusal(lambda: read_wav(file, RATE), file)


def test_a_wav_with_any_byte_changed_is_read_or_named(tmp_path: Path) -> None:
    """The header's numbers, each byte in turn set to 0, 1 and 255: no field may end in another exception."""
    file, whole = tmp_path / "a.wav", wav(channels=2, bits=24, tail=LIST)
    for place in range(44):
        for value in (0, 1, 255):
            file.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            read_or_named(lambda: read_wav(file, RATE), file)


# Pictures


def picture(form: str, size: tuple[int, int] = (9, 7)) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, form)
    return buffer.getvalue()


@pytest.mark.parametrize("form", slow_but(["png", "jpeg", "gif", "webp", "bmp", "tiff"], "png"))
def test_a_picture_cut_anywhere_is_read_or_named(form: str, tmp_path: Path) -> None:
    """A cut that loses no pixel (PNG's end mark) leaves a picture; every other one is named."""
    whole = picture(form)
    file = tmp_path / "a.png"
    refused = 0
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        refused += not read_or_named(lambda: read_folder(tmp_path, None), file)
    assert refused > len(whole) // 2


def test_a_picture_too_large_is_not_called_damaged(tmp_path: Path) -> None:
    import zlib

    file = tmp_path / "a.png"
    for side in (10_001, 12_000, 14_000, 60_000):
        chunk = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
        file.write_bytes(png + picture("png")[33:])
        line = refusal(lambda: read_folder(tmp_path, None), file)
        assert "too large" in line
        assert f"{PIXEL_LIMIT:,}" in line


# Text


@pytest.mark.parametrize("text", ["\ud800abc", "abc\udfff", "a" * 70_000 + "\udc80"])
def test_half_a_character_names_file_and_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "whole words"}) + "\n" + json.dumps({"text": text}) + "\n")
    line = refusal(lambda: read_source(str(file)), file)
    assert line.startswith("a.jsonl:2: ")
    assert "surrogate" in line


def test_half_a_character_in_a_prompt() -> None:
    with pytest.raises(SinkscopeError, match="surrogate"):
        encode(make_tokenizer(), "words \udcff", True)


@pytest.mark.parametrize("row", ["[" * 100_000, '{"text": ' + "[" * 100_000, '{"a":' * 100_000])
def test_lines_nested_too_deeply(row: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "words"}\n' + row)
    assert "line 2" in refusal(lambda: read_source(str(file)), file)


def test_a_row_of_many_columns_names_a_few(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({f"key{number}": 1 for number in range(10_000)}))
    line = refusal(lambda: read_source(str(file)), file)
    assert "9,990 more" in line
    assert len(line) < 400


def cuts(whole: bytes) -> Iterator[bytes]:
    yield from (whole[:length] for length in range(0, len(whole), 29))
    generator = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(whole)
        changed[generator.integers(len(changed))] = generator.integers(256)
        yield bytes(changed)


def test_a_damaged_parquet_file_is_read_or_named(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pd.DataFrame({"text": ["words of text", "other words"], "input_ids": [[1, 2], [3, 4]]}).to_parquet(file)
    whole = file.read_bytes()
    assert len(read_source(str(file)).documents) == 2
    for damaged in cuts(whole):
        file.write_bytes(damaged)
        read_or_named(lambda: read_source(str(file)), file)


# Files that are no files


def test_a_pipe_among_the_files_is_not_waited_for(tmp_path: Path) -> None:
    readers: dict[str, Callable[[], object]] = {
        "a.png": lambda: read_folder(tmp_path, None),
        "a.wav": lambda: read_wav(tmp_path / "a.wav", RATE),
    }
    for name, read in readers.items():
        os.mkfifo(tmp_path / name)
        assert "not a regular file" in refusal(read, tmp_path / name)
        (tmp_path / name).unlink()
