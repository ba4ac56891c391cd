"""Words for what transformers raises when it cannot load a checkpoint."""

from __future__ import annotations

from sinkscope.checkpoints.sources import Source, first_line, pickled_files, shorten


def why_not_loaded(source: Source, error: Exception) -> str:
    """One line for any defect of a checkpoint, with what to do where that is known."""
    text = str(error)
    if source.pickled and "weights_only" in text:
        return (
            f"{source.name}: its pickled weights ({', '.join(pickled_files(source))}) are damaged or hold more than "
            "tensors; convert them to safetensors"
        )
    if "trust_remote_code" in text:
        return f"{source.name} carries its own Python code: pass --trust-remote-code if you trust it"
    if isinstance(error, ImportError):
        return f"{source.name} needs a package that is not installed: {first_line(error)}"
    if "Unrecognized model" in text or "does not recognize this architecture" in text:
        return f"{source.name} is of a model type this transformers does not know: {first_line(error)}"
    detail = " ".join(text.split()) or type(error).__name__
    return f"cannot load {source.name}: {type(error).__name__}: {shorten(detail)}"
