"""What a scan reads: the SPECs, the token ids or the model's own task -> sequences the model can take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sinkscope.checkpoints import Checkpoint
from sinkscope.errors import SinkscopeError
from sinkscope.inputs import BOS_MODES, Corpus, TokenRules, check_spec, read_corpus, token_rules
from sinkscope.inputs.batches import TokenData, as_corpus, batches, token_data
from sinkscope.inputs.images import picture_paths
from sinkscope.inputs.naming import first_token
from sinkscope.inputs.sound import sound_paths
from sinkscope.inputs.vectors import TASKS, read_task, task_rules

DRY_RUN_TOKENS = 16
SEQ_LEN, NUM_SEQUENCES, DEFAULT_DATA = 256, 32, "prose"


@dataclass(frozen=True)
class Request:
    """What the user asks to be read. Raises SinkscopeError for what is wrong whatever the model.

    Attributes:
        data: a SPEC, a list of them, token ids, or None = "prose" (or the task a model brings).
        seq_len, num_sequences: None = 256 and 32 for text, all there is for token ids, the task's own for a task.
        bos: auto, always or never; several make a domain each.
        images, audio: a folder of pictures or of recordings, one for each sequence; prompt: the text beside each.
    """

    data: Any
    seq_len: int | None
    num_sequences: int | None
    bos: str | Sequence[str]
    seed: int
    images: str | Path | None = None
    prompt: str | None = None
    audio: str | Path | None = None

    def __post_init__(self) -> None:
        self._check_folders()
        if self.seq_len is not None and self.seq_len < 2:
            raise SinkscopeError(
                f"--seq-len {self.seq_len}: at least 2 tokens are needed (bos_mass starts at the second)"
            )
        if self.num_sequences is not None and self.num_sequences < 1:
            raise SinkscopeError(f"--num-sequences {self.num_sequences}: at least 1 is needed")
        for mode in self.bos_modes:
            if mode not in BOS_MODES:
                raise SinkscopeError(f"--bos {mode!r}: one of {', '.join(BOS_MODES)}")
        if not self.bos_modes or len(set(self.bos_modes)) < len(self.bos_modes):
            raise SinkscopeError("--bos names the same mode twice, or none")
        if self.seed < 0:
            raise SinkscopeError(f"--seed {self.seed}: 0 or more is needed")
        if len(set(self.specs)) < len(self.specs):
            raise SinkscopeError("--data names the same source twice")
        for spec in self.specs:
            if spec not in TASKS:
                check_spec(spec)

    def _check_folders(self) -> None:
        """What is wrong with a folder of pictures or recordings is said before the model is loaded."""
        if self.images is not None and self.audio is not None:
            raise SinkscopeError("--images and --audio: pictures are read, or recordings, not both")
        if self.data is not None and self.images is not None:
            raise SinkscopeError("--images and --data: pictures are read, or data, not both")
        if self.data is not None and self.audio is not None:
            raise SinkscopeError("--audio and --data: recordings are read, or data, not both")
        if self.images is not None:
            picture_paths(Path(self.images))
        elif self.audio is not None:
            sound_paths(Path(self.audio))
        elif self.prompt is not None:
            raise SinkscopeError("--prompt is the text beside --images or --audio")

    @property
    def bos_modes(self) -> list[str]:
        return [self.bos] if isinstance(self.bos, str) else list(self.bos)

    @property
    def specs(self) -> list[str]:
        """The SPECs that `data` names; none where it is token ids."""
        if self.data is None:
            return [DEFAULT_DATA]
        specs = [self.data] if isinstance(self.data, str) else self.data
        if not isinstance(specs, Sequence) or not all(isinstance(spec, str) for spec in specs):
            return []
        return list(specs)


@dataclass(frozen=True)
class Reading:
    """The sequences of a scan: one corpus a domain, with the tokens (or vectors) a model takes in the same order.

    `image_id`: the token that stands for a part of a picture, where text with pictures is read. `decoder_input`: what
    a decoder reads beside the sequences, where it is not what it would read by itself.
    """

    rules: TokenRules
    corpora: list[Corpus]
    tokens: list[TokenData]
    tokenizer: Any
    image_id: int | None = None
    decoder_input: str | None = None

    @property
    def total(self) -> int:
        """Sequences in all."""
        return sum(len(data.ids) for data in self.tokens)

    @property
    def warnings(self) -> list[str]:
        return [warning for corpus in self.corpora for warning in corpus.warnings]

    def first_token(self, domains: int | None = None) -> dict[str, Any]:
        """Id, text and kind of the first token over the first `domains` corpora."""
        return first_token([corpus.ids for corpus in self.corpora[:domains]], self.rules, self.tokenizer)

    def first_sequence(self, device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The valid tokens of the first sequence, [1, length], and what else the model takes with them."""
        batch = next(batches(self.tokens[0], 0, 1, device))
        inputs = batch.inputs if batch.spans is None else batch.inputs[:, slice(*batch.spans[0])]
        return inputs, batch.extra


def probe(checkpoint: Checkpoint) -> torch.Tensor:
    """One short input for the dry run."""
    if checkpoint.task is not None:
        return torch.from_numpy(checkpoint.task.read(None, 1, 0).vectors).to(checkpoint.device)
    return torch.arange(DRY_RUN_TOKENS, device=checkpoint.device).remainder(checkpoint.vocabulary)[None]


def several_probes(checkpoint: Checkpoint) -> torch.Tensor:
    """DRY_RUN_TOKENS short inputs, all their tokens different (a task's begin with its BOS)."""
    if checkpoint.task is not None:
        return torch.from_numpy(checkpoint.task.read(None, DRY_RUN_TOKENS, 0).vectors).to(checkpoint.device)
    count, length = DRY_RUN_TOKENS, 4
    ids = torch.randperm(max(checkpoint.vocabulary, count * length), generator=torch.Generator().manual_seed(0))
    ids = ids[: count * length].remainder(checkpoint.vocabulary)
    return ids.view(count, length).to(checkpoint.device)


def read_inputs(request: Request, checkpoint: Checkpoint) -> Reading:
    """The sequences of every domain: the model's own task, text, or token ids as given.

    Raises SinkscopeError where they cannot be read, or are longer than the model's positions.
    """
    if checkpoint.task is not None:
        drawn = read_task(
            checkpoint.task, request.data, checkpoint.name, request.seq_len, request.num_sequences, request.seed
        )
        tokens = TokenData(drawn.ids, vectors=drawn.vectors)
        return Reading(task_rules(checkpoint.task), [drawn], [tokens], checkpoint.tokenizer)
    rules = token_rules(checkpoint.tokenizer, checkpoint.vocabulary)
    for spec in request.specs:
        check_spec(spec)  # the name of a task is none of the data that other models read
    if request.specs:
        corpora = _read_text(request, checkpoint, rules)
        return Reading(rules, corpora, [TokenData(corpus.ids) for corpus in corpora], checkpoint.tokenizer)
    tokens = _read_ids(request, checkpoint)
    return Reading(rules, [as_corpus(tokens)], [tokens], checkpoint.tokenizer)


def _read_text(request: Request, checkpoint: Checkpoint, rules: TokenRules) -> list[Corpus]:
    """One corpus a SPEC and BOS mode, checked against the model's positions."""
    length, count = request.seq_len or SEQ_LEN, request.num_sequences or NUM_SEQUENCES
    check_length(checkpoint, length)
    if checkpoint.tokenizer_error and not all(_needs_no_tokenizer(spec) for spec in request.specs):
        raise SinkscopeError(
            f"{checkpoint.name} has no usable tokenizer ({checkpoint.tokenizer_error}): text cannot be read; "
            "give token ids (.jsonl with `input_ids`) or --data random"
        )
    corpora = []
    for spec in request.specs:
        for mode in request.bos_modes:
            corpus = read_corpus(spec, checkpoint.tokenizer, rules, length, count, mode, request.seed)
            name = spec if len(request.bos_modes) == 1 else f"{spec} bos={mode}"
            corpora.append(replace(corpus, domain=name))
    return corpora


def _read_ids(request: Request, checkpoint: Checkpoint) -> TokenData:
    """Token ids as given; cut where `seq_len` or `num_sequences` say so."""
    tokens = token_data(request.data, checkpoint.vocabulary)
    rows, columns = slice(request.num_sequences), slice(request.seq_len)
    mask = None if tokens.mask is None else tokens.mask[rows, columns]
    tokens = TokenData(tokens.ids[rows, columns], mask)
    check_length(checkpoint, tokens.longest)
    return tokens


def _needs_no_tokenizer(spec: str) -> bool:
    return spec in ("random", "repeated") or spec.partition("#")[0].endswith((".jsonl", ".parquet"))


def check_length(checkpoint: Checkpoint, length: int) -> None:
    """Raises SinkscopeError for sequences longer than the model's positions."""
    limit = checkpoint.max_positions
    if limit is not None and length > limit:
        raise SinkscopeError(
            f"--seq-len {length} exceeds the {limit} positions of {checkpoint.name}: give {limit} or less"
        )
