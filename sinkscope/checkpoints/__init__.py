"""A name (hub id, folder, .gguf file, example:NAME) -> model without its head, tokenizer, facts about both."""

from sinkscope.checkpoints.checkpoint import Checkpoint
from sinkscope.checkpoints.examples import EXAMPLES, Example
from sinkscope.checkpoints.loading import LoadOptions, open_checkpoint, wrap_model

__all__ = ["EXAMPLES", "Checkpoint", "Example", "LoadOptions", "open_checkpoint", "wrap_model"]
