"""Reads a folder of pictures through a checkpoint's own processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.signals import PIXELS

SUFFIXES = (".png", ".jpg", ".jpeg")
PROMPT = "Describe the picture."


def processed(folder: str | Path, prompt: str | None, count: int | None, origin: dict[str, Any], alone: bool) -> Any:
    """Returns the processor's output for the first `count` pictures of a folder (png and jpg, sorted by name).

    `origin`: arguments of from_pretrained. `alone`: the model reads pictures without text; the output is then one
    mapping with all pictures, else a list of mappings, one per sequence. Raises SinkscopeError: no pictures, one that
    cannot be read, no processor, a prompt for a model without text.
    """
    pictures = read_folder(Path(folder), count)
    if not origin:
        raise SinkscopeError("--images needs a model by name: a model object has no processor; give pixel_values")
    if alone and prompt is not None:
        raise SinkscopeError("--prompt: this model reads pictures alone, no text")
    processor = _processor(origin, alone)
    try:
        if alone:
            return processor(images=list(pictures.values()), return_tensors="pt")
        return [_with_text(processor, picture, PROMPT if prompt is None else prompt) for picture in pictures.values()]
    except (ValueError, TypeError, KeyError, RuntimeError, ImportError) as error:
        raise SinkscopeError(
            f"the model's own processor cannot read these pictures: {' '.join(str(error).split())[:200]}"
        ) from error


def read_folder(folder: Path, count: int | None) -> dict[str, Any]:
    """Reads RGB pictures, by file name. Raises SinkscopeError: no Pillow, no pictures, one that cannot be read."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise SinkscopeError("--images needs the package Pillow: pip install pillow") from None
    pictures = {}
    for path in picture_paths(folder)[:count]:
        try:
            with Image.open(path) as picture:
                pictures[path.name] = picture.convert("RGB")
        except (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError):
            raise SinkscopeError(f"--images: {path} is damaged or not a picture") from None
    return pictures


def picture_paths(folder: Path) -> list[Path]:
    """The png and jpg files of a folder, by name. Raises SinkscopeError where there are none."""
    if not folder.is_dir():
        raise SinkscopeError(f"--images {folder}: no such folder")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise SinkscopeError(f"--images {folder}: no .png or .jpg in it")
    return paths


def _processor(origin: dict[str, Any], alone: bool) -> Any:
    from transformers import AutoImageProcessor, AutoProcessor

    family = AutoImageProcessor if alone else AutoProcessor
    try:
        processor = family.from_pretrained(**origin)
    except Exception as error:  # absent, damaged, missing package: transformers' text says which
        raise SinkscopeError(f"--images: no usable processor: {' '.join(str(error).split())[:200]}") from error
    if not alone and not hasattr(processor, "image_processor"):
        raise SinkscopeError("--images: the checkpoint has no processor for text with pictures")
    return processor


def _with_text(processor: Any, picture: Any, prompt: str) -> dict[str, Any]:
    """Builds one sequence of the picture and the prompt, by the chat template or, without one, the image token."""
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    else:
        text = f"{getattr(processor, 'image_token', '<image>')}\n{prompt}"
    given = dict(processor(images=[picture], text=[text], return_tensors="pt"))
    if PIXELS not in given:
        raise ValueError(f"it returns no {PIXELS}")
    return given
