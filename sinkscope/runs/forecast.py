"""What a dry run says before a measurement: what would be read and how, the memory, the passes, the time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

DRY, CONFIGURATION = "a pass on shapes alone", "the configuration alone"
"""How the attention was found: by the plan of a forward pass of shapes, or by counts that the configuration names."""


@dataclass(frozen=True)
class Attention:
    """Attention calls of one kind, in one stream.

    Attributes:
        kind: `full`, `sliding:W`, `chunked:C` or `cross`.
        path: how they are read: `interface` (transformers' attention interface) or `inline` (the model's own code);
            None where only the configuration is known.
        score: `softmax`, or the name of another score.
        calls: how many there are. heads, kv_groups: query heads, and key/value heads, of each call.
    """

    stream: str
    kind: str
    path: str | None
    score: str
    calls: int
    heads: int
    kv_groups: int


@dataclass(frozen=True)
class Memory:
    """Bytes. None where it cannot be said.

    Attributes:
        weights: all weights in the dtype they are loaded in.
        files: the weight files.
        activations: most that the results of the largest forward pass hold at once, its own attention left out.
        logits: the next-token logits of the unablated model, which are kept beside those of each arm.
        watching: the sums of one attention call, and the block of logits that they are taken from.
        kept: what a scan keeps of all sequences until the tables are written, on the CPU.
        free: free memory of the device now.
    """

    weights: int
    files: int | None
    activations: int | None
    logits: int
    watching: int | None
    kept: int | None
    device: str
    free: int | None

    @property
    def needed(self) -> int | None:
        """What the device must hold at once, but for the little that torch and Python take."""
        if self.activations is None or self.watching is None:
            return None
        kept = self.kept or 0 if self.device == "cpu" else 0
        return self.weights + self.activations + self.logits + self.watching + kept


@dataclass(frozen=True)
class Passes:
    """Forward passes of one purpose. `tokens`: positions that each reads, over all its sequences."""

    what: str
    passes: int
    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of all these passes."""
        return self.sequences * self.length


@dataclass(frozen=True)
class Time:
    """An estimate.

    Attributes:
        rate: FLOP/s that are counted on.
        utilisation: the share that this is of the machine's peak rate or, where `measured`, of a matrix product's.
        seconds: between `least` and `most` where the estimate is off by no more than `factor`.
    """

    machine: str
    rate: float
    utilisation: float
    measured: bool
    seconds: float
    factor: float

    @property
    def least(self) -> float:
        """The shortest time to expect, in seconds."""
        return self.seconds / self.factor

    @property
    def most(self) -> float:
        """The longest time to expect, in seconds."""
        return self.seconds * self.factor


@dataclass(frozen=True)
class Forecast:
    """What `dry_run` returns.

    Attributes:
        command: `scan`, or the command whose arms would be measured.
        found_by: DRY or CONFIGURATION; `why` says why it is the second.
        layers, heads: attention calls, and query heads of all of them.
        unread: modules whose attention is no single map of queries and keys, so that their heads are not read.
        batch_size: sequences of the largest pass; seq_len: its tokens in each.
        flops: floating-point operations of all passes. None where it cannot be said.
        gpus: the number of GPUs of `gpu_bytes` that weights, activations and sums would fill to `margin`.
        trials: for arms: how often each sequence is read, the unablated model and all draws counted.
        notes: what is guessed, and what cannot be said.
    """

    command: str
    model: str
    revision: str | None
    model_type: str | None
    family: str
    parameters: int
    dtype: str
    found_by: str
    why: str | None
    attention: list[Attention]
    layers: int
    heads: int
    unread: list[str]
    memory: Memory
    passes: list[Passes]
    batch_size: int
    seq_len: int
    flops: int | None
    time: Time | None
    gpus: int | None
    gpu_bytes: int
    margin: float
    trials: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool | None:
        """Whether the device's free memory suffices; None where one of the two is not known."""
        needed, free = self.memory.needed, self.memory.free
        return None if needed is None or free is None else needed <= free

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {
            "fits": self.fits,
            "needed": self.memory.needed,
            "tokens": sum(passes.tokens for passes in self.passes),
        }
