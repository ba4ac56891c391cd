"""A loaded model with its tokenizer, its facts for the manifest, and its limits."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from sinkscope.capture.hooks import hooked
from sinkscope.capture.output_projection import holds_codes, is_linear, quantiser, widths
from sinkscope.capture.private_doors import attention_name, storage_number
from sinkscope.checkpoints.placement import devices, input_device
from sinkscope.checkpoints.private_doors import tokenizer_rules
from sinkscope.checkpoints.tensor_hash import tensors_sha256
from sinkscope.checkpoints.weight_files import Hashing, Stamp, check_unchanged
from sinkscope.errors import SinkscopeError
from sinkscope.inputs.signals import KindNames, VectorTask, task_of


@dataclass
class Checkpoint:
    """A loaded model, ready to be measured.

    Attributes:
        name: the MODEL argument.
        model: the base model in eval mode; the whole model where its head was asked for.
        tokenizer: None where the checkpoint has none; `tokenizer_error` then says why.
        facts: the manifest's facts about the model: id, revision, weights' hash, class, dtype, device, ...
        task: the task that draws the inputs of a model that reads real vectors; None for other models.
        origin: arguments of from_pretrained that load other parts of the checkpoint (its processor); empty for a model
            object.
    """

    name: str
    model: nn.Module
    tokenizer: Any
    facts: dict[str, Any]
    tokenizer_error: str | None = None
    warnings: list[str] = field(default_factory=list)
    task: VectorTask | None = field(init=False, default=None)
    origin: dict[str, Any] = field(default_factory=dict)
    weights: dict[Path, Stamp] = field(default_factory=dict)
    """The weight files as they were before loading; empty for a model object."""
    writer: nn.Module | None = None
    """The model with its language-model head, where it is to write text."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What opening it took: `loading` in all, `hash` of the weights beside it, `wait_for_hash` within `loading`."""
    hashing: Hashing | None = None
    """The thread that hashes the weights still; None once `settle` has the hash."""
    hashed: list[Path] = field(default_factory=list)
    """The files whose hash it makes."""

    def __post_init__(self) -> None:
        self.task = task_of(self.model)
        if self.task is not None:
            self.tokenizer = KindNames(self.task.tokens)

    def settle(self) -> None:
        """Waits for the weights' hash and puts it into the facts. Raises SinkscopeError where a file has changed."""
        if self.hashing is not None:
            self.facts["weights_sha256"] = self.hashing.joined(self.hashed)
            self.close()
            self.check_unchanged()

    def identify(self) -> None:
        """Puts the SHA-256 of a model object's numbers into the facts, so that what is kept is taken for no other's.

        It reads all weights before the first batch. A thread beside the batches would save the time of one batch, after
        which the hash is needed, and would read weights that accelerate moves meanwhile.
        """
        self.facts["tensors_sha256"] = tensors_sha256(self.model)

    def close(self) -> None:
        """Ends the thread that hashes the weights: nobody needs their hash any more."""
        if self.hashing is not None:
            self.hashing.stop()
            self.hashing = None

    def check_unchanged(self) -> None:
        """Raises SinkscopeError where a weight file has changed: on a CPU the model may read it while it runs."""
        check_unchanged(self.weights)

    @property
    def device(self) -> torch.device:
        """The device for token ids: that of the embedding (the first parameter)."""
        return input_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """The type of its first floating-point weight; float32 where it has none."""
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)

    @property
    def vocabulary(self) -> int:
        """Number of token ids, 0 to `vocabulary` - 1: rows of the embedding, in an encoder-decoder of the smaller one,
        since both parts read the same text.

        Where the base model has several embeddings or shows none, it is the configuration's `vocab_size`. Raises
        SinkscopeError where there is none either, as in a model that reads vectors.
        """
        try:
            rows = int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
            return min(rows, self._decoder_rows or rows)
        except (NotImplementedError, AttributeError):
            config = configuration(self.model)
            if config is None:
                return self._table_rows
            size = getattr(config.get_text_config(), "vocab_size", None)
            if isinstance(size, int) and size > 0:
                return size
            raise SinkscopeError(
                f"{type(self.model).__name__} has no token embedding: its vocabulary is unknown"
            ) from None

    @property
    def _decoder_rows(self) -> int | None:
        """Rows of the decoder's own embedding in an encoder-decoder; None where none is shown."""
        if not getattr(configuration(self.model), "is_encoder_decoder", False):
            return None
        decoder: Any = self.model.get_decoder()  # type: ignore[operator]
        try:
            table = decoder.get_input_embeddings()
        except (NotImplementedError, AttributeError):  # FSMT's is no transformers model
            table = getattr(decoder, "embed_tokens", None)
        return None if table is None else int(table.weight.shape[0])

    @cached_property
    def _table_rows(self) -> int:
        """Rows of the embedding that reads the token ids, in a module that names none; of the largest, where none does
        in a pass over two ids. Raises SinkscopeError where there is no embedding."""
        tables = [module for module in self.model.modules() if isinstance(module, nn.Embedding)]
        if not tables:
            raise SinkscopeError(f"{type(self.model).__name__} has no token embedding: its vocabulary is unknown")
        read = _given_to(self.model, tables, torch.zeros(1, 2, dtype=torch.long, device=self.device))
        return max(table.num_embeddings for table in read or tables)

    @property
    def max_positions(self) -> int | None:
        """Positions that the configuration allows; None where it names no limit.

        RoBERTa and related models number positions from the padding id + 1, so they have that many fewer.
        """
        for module in self.model.modules():
            table = getattr(module, "position_embeddings", None)
            if isinstance(table, nn.Embedding) and table.padding_idx is not None:
                return table.num_embeddings - table.padding_idx - 1
        whole_config = configuration(self.model)
        config = None if whole_config is None else whole_config.get_text_config()
        for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            limit = getattr(config, key, None)
            if isinstance(limit, int) and limit > 0:
                return limit
        return None


def _given_to(model: nn.Module, tables: list[nn.Embedding], ids: Tensor) -> list[nn.Embedding]:
    """The embeddings that a pass over these ids hands the ids themselves: not those of positions or segments, of which
    one may have more rows."""
    if len(tables) == 1 or ids.is_meta:
        return []
    read, memory = list[nn.Embedding](), storage_number(ids)

    def see(table: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and storage_number(args[0]) == memory:
            read.extend(one for one in tables if one is table)

    with torch.no_grad(), hooked(tables, pre=see), suppress(Exception):  # what it cannot do with two ids is no matter
        model(ids)
    return read


def configuration(model: nn.Module) -> Any:
    """The model's transformers configuration; None for a module of another kind, whatever its `config` is."""
    config = getattr(model, "config", None)
    return config if isinstance(config, PreTrainedConfig) else None


def add_facts(checkpoint: Checkpoint, tokenizer_sha256: Callable[[], str | None] | None = None) -> None:
    """Adds the facts that the model and its configuration show. `tokenizer_sha256`: gives that hash, where a thread
    makes it."""
    model = checkpoint.model
    config = configuration(model)
    checkpoint.facts |= {
        "config_sha256": None if config is None else _config_hash(config),
        "tokenizer_sha256": tokenizer_hash(checkpoint.tokenizer) if tokenizer_sha256 is None else tokenizer_sha256(),
        "class": type(model).__name__,
        "model_type": getattr(config, "model_type", None),
        "parameters": _parameters(model),
        **_computed_in(model, checkpoint.dtype),
        "max_positions": checkpoint.max_positions,
        "quantization": quantization(config) or quantiser(model),
    }


def computed_now(checkpoint: Checkpoint) -> dict[str, str | None]:
    """What a pass that runs now computes in: the facts that a program may change between two passes. The dtype is
    autocast's, where that is on."""
    kind, dtype = checkpoint.device.type, checkpoint.dtype
    if dtype == torch.float32 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return _computed_in(checkpoint.model, dtype)


def _computed_in(model: nn.Module, dtype: torch.dtype) -> dict[str, str | None]:
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "device": devices(model),
        "attention_implementation": attention_name(configuration(model)),
    }


def _parameters(model: nn.Module) -> int:
    """Number of parameters. A quantised linear layer has those that it would have otherwise: packages pack several
    codes into one number, and may keep them in buffers."""
    coded = [module for module in model.modules() if is_linear(module) and holds_codes(module)]
    packed = {id(parameter) for module in coded for parameter in module.parameters(recurse=False)}
    biases = [bias for module in coded if isinstance(bias := getattr(module, "bias", None), Tensor)]
    plain = [parameter for parameter in model.parameters() if id(parameter) not in packed]
    return sum(math.prod(widths(module)) for module in coded) + sum(part.numel() for part in (*plain, *biases))


def _config_hash(config: Any) -> str:
    """SHA-256 of the configuration as it was loaded, without what names the file and the library that wrote it."""
    settings = json.loads(config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "transformers_version"):
        settings.pop(name, None)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def tokenizer_hash(tokenizer: Any) -> str | None:
    """SHA-256 of a tokenizer: of its serialisation, or of its vocabulary and the files that it writes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return hashlib.sha256(tokenizer_rules(backend).encode()).hexdigest()
    if not hasattr(tokenizer, "get_vocab"):
        return None
    digest = hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode())
    # A tokenizer without files of its own, such as one of characters, says so by NotImplementedError.
    with suppress(NotImplementedError), tempfile.TemporaryDirectory() as folder:
        for file in filter(None, tokenizer.save_vocabulary(folder) or ()):
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def quantization(config: Any) -> str | None:
    """The method by which a configuration says that weights are quantised."""
    setting = getattr(config, "quantization_config", None)
    if setting is None:
        return None
    method = setting.get("quant_method") if isinstance(setting, dict) else getattr(setting, "quant_method", None)
    return str(getattr(method, "value", method))


def default_length(checkpoint: Checkpoint, usual: int) -> int:
    """`usual` tokens, or as many as the model has positions where these are fewer."""
    return min(usual, checkpoint.max_positions or usual)


def check_length(checkpoint: Checkpoint, length: int, generated: int = 0) -> None:
    """Raises SinkscopeError for sequences, with what is generated after each, longer than the model's positions."""
    limit = checkpoint.max_positions
    if limit is not None and length + generated > limit:
        if generated:
            raise SinkscopeError(
                f"{length} tokens and the {generated} of --generate exceed the {limit} positions of "
                f"{checkpoint.name}: give a smaller --seq-len or --generate"
            )
        raise SinkscopeError(
            f"--seq-len {length} exceeds the {limit} positions of {checkpoint.name}: give {limit} or less"
        )
