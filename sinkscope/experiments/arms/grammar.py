"""The grammar of arms: KIND:REST, where each kind reads its own rest. What `--help`, docs/commands/arms.md and errors
say of the kinds is said here. Only reading an arm loads the code of its kind, and with it torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sinkscope.errors import SinkscopeError
from sinkscope.lookup import Lookup, a_function

if TYPE_CHECKING:
    from sinkscope.experiments.arms.arm import Arm

Reader = Callable[[str], "Arm"]
"""Reads what follows `KIND:`. Raises SinkscopeError for a rest that it cannot read."""

POSITIONS = "firstN, middleN, recentN, randomN, sinks or sink-tokens"
KINDS_FOLDER = "sinkscope.experiments.arms.kinds"


@dataclass(frozen=True)
class ArmKind:
    """A kind of arm: its name, how its arms are written, what they do, and where that comes from.

    Attributes:
        reader: MODULE:FUNCTION within kinds/; empty for a kind that was declared in Python.
        example, short: one arm, and what it does in a line of `--help`; by default the first form of the grammar, and
            the first sentence of `what`.
    """

    name: str
    grammar: str
    what: str
    source: str
    reader: str = ""
    example: str = ""
    short: str = ""

    @property
    def line(self) -> tuple[str, str]:
        """The example and what it does."""
        return self.example or self.grammar.split(" or ")[0].split(",")[0], self.short or self.what.split(". ")[0]


BUILT_IN = (
    ArmKind(
        "heads", "heads:SCORE:5%, heads:SCORE:low5%, heads:3.1+4.0 or heads:randomN",
        "Heads set to 0 where the output projection reads them, the same in every sequence: the share of all heads, "
        "rounded half up, that a score of the run calls most dormant (in a tie the earlier layer and head), those "
        "listed as LAYER.HEAD, or N random ones.",
        "Sandoval-Segura et al. 2504.03889", "heads:read_heads",
        "heads:honor:5%", "heads set to 0, the same in every sequence",
    ),
    ArmKind(
        "dynamic", "dynamic:SCORE:5% or dynamic:SCORE:low5%",
        "In each sequence, the heads set to 0 whose score there is at or beyond a quantile of the run, so that other "
        "heads go in other sequences. The quantile is that of the scores of all pairs of a sequence and a head, "
        "between two values the straight line: heads go that are at most the 5 % quantile where low values mean "
        "dormant, at least the 95 % quantile where high ones do. Scores are taken without any head zeroed, in a scan "
        "of the held-out text. The published shares of dormant heads are of this kind.",
        "Sandoval-Segura et al. 2504.03889", "dynamic:read_dynamic",
        "dynamic:honor:5%", "heads set to 0 in the sequences where they are dormant",
    ),
    ArmKind(
        "value", "value:POSITIONS",
        "Values at some positions set to 0 in all heads: queries go on attending there, and get nothing.",
        "Gu et al. 2410.10781", "value:read_value",
        "value:first1", "values at some positions set to 0",
    ),
    ArmKind(
        "keys", "keys:POSITIONS",
        "Keys at some positions hidden from all later queries, in every layer. A key's own query still sees "
        "it. The option --tokens of ablate is keys:first1.",
        "ours", "keys:read_keys",
        "keys:first1", "keys at some positions hidden from later queries",
    ),
    ArmKind(
        "window", "window:W+S, window:W+randomS, either with /full, then with /SCORE:50% or /randomN",
        "Every query sees the last W keys and the first S (or S random ones): what a cache that evicts all others "
        "would see. With /full only in layers that have no window of their own. With a plan only in some KV heads: "
        "those that a score of the run calls most dormant, or N random ones; the others keep their cache.",
        "Xiao et al. 2309.17453 (StreamingLLM), 2410.10819 (DuoAttention: the plan)", "window:read_window",
        "window:256+4", "queries see the last 256 keys and the first 4",
    ),
    ArmKind(
        "kv", "kv:BITS or kv:BITS+POSITIONS",
        "Keys and values rounded to the nearest of 2^BITS levels, evenly spaced from the smallest to the largest "
        "number (the ends), those of some positions kept in 16 bits. Each KV head has ends of its own: for keys those "
        "of each channel over the sequence, after rotary embeddings, for values those of each token over its channels. "
        "The ends are computed without the tokens that are kept. 16 bits change nothing.",
        "KVSink 2508.04257", "kv:read_kv",
        "kv:4+first1", "keys and values rounded to 4 bits, except at position 0",
    ),
    ArmKind(
        "acts", "acts:BITS/tensor or acts:BITS/token, either with +POSITIONS",
        "The inputs of all linear modules but the next-token head rounded to the nearest whole number of steps. A step "
        "is the largest |x| of the sequence (tensor) or of the token, over 2^(BITS-1) - 1, so that as many levels lie "
        "on each side of 0. The rows of some positions stay in 16 bits and have no part in the step: the largest |x| "
        "is that of the other rows. An arm without positions also measures itself with the sinks in 16 bits: the "
        "difference is d_sink.",
        "ours", "acts:read_acts",
        "acts:8/tensor", "inputs of linear modules rounded to 8 bits",
    ),
    ArmKind(
        "massive", "massive:zero or massive:mean, either with /first or /others",
        "Massive elements set to 0, or to the mean of the massive elements of that channel in the other sequences "
        "(first tokens and later ones apart; an element stays where they have none). They lie in the channels that the "
        "run found massive, and are read and set at the input of the block where the channel is first massive. Only "
        "elements go whose abs is > 100 and > 1000 x the median abs of the sequence there: at all positions, with "
        "/first only at position 0, with /others only at later ones.",
        "Sun et al. 2402.17762", "massive:read_massive",
        "massive:zero", "massive activations set to 0, or to their mean",
    ),
    ArmKind(
        "first-token", "first-token:TEXT or first-token:random",
        "What stands at position 0 replaced by the one token that TEXT is, or by one drawn from the vocabulary.",
        "Barbero et al. 2504.02732", "first_token:read_first_token",
        "first-token:random", "another token at position 0",
    ),
    ArmKind(
        "neuron", "neuron:L.N or neuron:L.random",
        "Neuron N of the MLP of layer L set to 0 at every position, or one drawn from that layer.",
        "Guo et al. 2410.13835, Yu et al. 2411.07191 (which neurons)", "neuron:read_neuron",
        "neuron:11.1229", "one neuron of an MLP set to 0",
    ),
    ArmKind(
        "map", "map:3.1+4.0 or map:layerL, either with /ridgeR",
        "The outputs of heads listed as LAYER.HEAD, or of all heads of a layer, replaced where the output projection "
        "reads them by the best affine map, token by token, of what the layer's attention reads: what is lost is what "
        "they move between tokens. Least squares on up to 32 more sequences of the same data, none of which is "
        "measured; the smallest map where several fit alike. With /ridgeR R times the squared size of the map counts "
        "beside the mean squared error.",
        "ours", "per_token:read_map",
        "map:3.1+4.0", "heads replaced by the best map of single tokens",
    ),
)  # fmt: skip
"""The kinds that ship with sinkscope, in the order of `--help`: a new one is a file of kinds/ and its entry here."""

KINDS = {kind.name: kind for kind in BUILT_IN}
"""What is known of each kind by name, also of those that `arm_kind` declared."""

READERS: Lookup[Reader] = Lookup(
    "the kind of arm", {kind.name: f"{KINDS_FOLDER}.{kind.reader}" for kind in BUILT_IN}, "sinkscope.arms",
    a_function,
)  # fmt: skip
"""What reads the rest of each kind by name. Another package adds one by an entry point of the group."""


def arm_kind(name: str, grammar: str, source: str) -> Callable[[Reader], Reader]:
    """Declares a kind of arm: the function reads what follows `NAME:`, and its docstring says what the arm does.

    The function raises SinkscopeError for a rest that it cannot read. Raises SinkscopeError for a name that is declared
    already.
    """

    def declare(read: Reader) -> Reader:
        READERS.add(name, read)
        KINDS[name] = ArmKind(name, grammar, " ".join((read.__doc__ or "").split()), source)
        return read

    return declare


def read_arm(text: str) -> Arm:
    """Reads one arm. Raises SinkscopeError for an unknown kind, or a rest that its kind cannot read."""
    name, _, rest = text.partition(":")
    if name not in READERS:
        raise SinkscopeError(f"--arm {text!r}: no such kind of arm; one of {', '.join(READERS)}")
    read = READERS[name]
    try:
        return read(rest)
    except SinkscopeError as error:
        raise SinkscopeError(f"--arm {text!r}: {error}; write {written(name)}") from None


def written(name: str) -> str:
    """How the arms of a kind are written, with what POSITIONS are."""
    grammar = KINDS[name].grammar if name in KINDS else f"{name}:REST"
    return f"{grammar} with {POSITIONS}" if "POSITIONS" in grammar else grammar


def listed() -> list[tuple[str, str]]:
    """An arm of each kind and what it does, in a line each; of another package's kind its name alone, which loads
    nothing."""
    others = [(f"{name}:REST", "of another package") for name in READERS if name not in KINDS]
    return [*(kind.line for kind in KINDS.values()), *others]


def told() -> str:
    """The kinds in full, a paragraph each; of another package's kind its name alone."""
    known = [f"{kind.grammar}: {kind.what}" for kind in KINDS.values()]
    others = [f"{name}:REST: of another package" for name in READERS if name not in KINDS]
    return "\n\n".join([*known, *others, f"POSITIONS: {POSITIONS}"])


def number(text: str, what: str, least: int, most: int = 2**24) -> int:
    """Reads a whole number. Raises SinkscopeError, which names `what`, where it is none or outside least..most."""
    if not text.isascii() or not text.isdigit() or len(text) > 12 or not least <= int(text) <= most:
        raise SinkscopeError(f"{what} {text[:20]!r} is no whole number from {least} to {most:,}")
    return int(text)
