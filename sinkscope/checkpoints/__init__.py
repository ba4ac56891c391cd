"""Turns a name (hub id, folder, .gguf file, example:NAME) into a headless model, its tokenizer and their facts."""

from sinkscope.checkpoints.checkpoint import Checkpoint
from sinkscope.checkpoints.examples import EXAMPLES, Example
from sinkscope.checkpoints.loading import LoadOptions, open_checkpoint, wrap_model

__all__ = ["EXAMPLES", "Checkpoint", "Example", "LoadOptions", "open_checkpoint", "wrap_model"]
