"""Reads a folder of pictures through a checkpoint's own processor."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError, all_lines
from sinkscope.inputs.documents import check_regular, from_checkpoint, listed
from sinkscope.inputs.signals import PIXELS

LONGEST_SIDE = 10_000
"""Most pixels of a side that a processor may make pictures of."""

SUFFIXES = (".png", ".jpg", ".jpeg")
PROMPT = "Describe the picture."
PIXEL_LIMIT = 100_000_000
"""Most pixels of a picture. A damaged or hostile head may declare far more than the file's size suggests."""


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
        raise SinkscopeError(f"the model's own processor cannot read these pictures: {all_lines(error)}") from error


def read_folder(folder: Path, count: int | None) -> dict[str, Any]:
    """Reads RGB pictures, by file name. Raises SinkscopeError: no Pillow, no pictures, one that cannot be read."""
    try:
        from PIL import Image
    except ImportError:
        raise SinkscopeError("--images needs the package Pillow: pip install pillow") from None
    pictures = {}
    for path in picture_paths(folder)[:count]:
        check_regular(path, "--images")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about damage that Pillow reads past, and about large pictures
                with Image.open(path) as picture:
                    too_large = picture.width * picture.height > PIXEL_LIMIT
                    if not too_large:
                        pictures[path.name] = _upright(picture)
        except Image.DecompressionBombError:
            too_large = True
        except Exception:  # each format's reader meets damage with exceptions of its own
            raise SinkscopeError(f"--images: {path} is damaged or not a picture") from None
        if too_large:
            raise SinkscopeError(
                f"--images: {path} is too large: it has more than {PIXEL_LIMIT:,} pixels; make it smaller"
            )
    return pictures


def _upright(picture: Any) -> Any:
    """The picture in RGB, turned as its camera says, as transformers' own `load_image` turns it.

    Pillow would clip the 65,536 levels of a grey picture of 16 bits to 255.
    """
    from PIL import Image, ImageOps

    turned = ImageOps.exif_transpose(picture)
    if turned.mode.startswith("I"):
        levels = np.clip(np.asarray(turned, dtype=np.float64), 0, 65_535)
        turned = Image.fromarray(np.rint(levels / 257).astype(np.uint8))
    return turned.convert("RGB")


def picture_paths(folder: Path) -> list[Path]:
    """The png and jpg files of a folder, by name. Raises SinkscopeError where there are none."""
    return listed(folder, "--images", SUFFIXES)


def _processor(origin: dict[str, Any], alone: bool) -> Any:
    from transformers import AutoImageProcessor, AutoProcessor

    processor = from_checkpoint(AutoImageProcessor if alone else AutoProcessor, origin, "--images", "processor")
    if not alone and not hasattr(processor, "image_processor"):
        raise SinkscopeError("--images: the checkpoint has no processor for text with pictures")
    _check_sizes(processor if alone else processor.image_processor)
    return processor


def _check_sizes(processor: Any) -> None:
    """Raises SinkscopeError where a processor enlarges pictures past what memory holds.

    Qwen's processors, which merge patches, give numbers of pixels as their `longest_edge` and `shortest_edge`.
    """
    areas = hasattr(processor, "merge_size")
    for setting in ("size", "crop_size", "pad_size"):
        sizes = getattr(processor, setting, None)
        for name, number in dict(sizes or {}).items():
            most = PIXEL_LIMIT if areas and name.endswith("_edge") else LONGEST_SIDE
            if isinstance(number, int | float) and number > most:
                raise SinkscopeError(
                    f"--images: the checkpoint's preprocessor_config.json says {setting} {name} {number:g}, and at "
                    f"most {most:,} is possible: it is damaged"
                )


def _with_text(processor: Any, picture: Any, prompt: str) -> dict[str, Any]:
    """Builds one sequence of the picture and the prompt, by the chat template or, without one, the image token."""
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    else:
        text = f"{getattr(processor, 'image_token', '<image>')}\n{prompt}"
    sequence = dict(processor(images=[picture], text=[text], return_tensors="pt"))
    if PIXELS not in sequence:
        raise ValueError(f"it returns no {PIXELS}")
    return sequence
