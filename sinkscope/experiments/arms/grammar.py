"""The grammar of arms: KIND:REST, where each kind reads its own rest. What `--help`, docs/commands/arms.md and errors
say of the kinds is said here. Only reading an arm loads the code of its kind, and with it torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sinkscope.errors import SinkscopeError, did_you_mean, first_line
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
        "Sets heads to 0 where the output projection reads them; the same heads in every sequence. The heads are the "
        "given share of all heads (rounded to the nearest whole number, halves up) that a score of the run ranks as "
        "most dormant, with ties going to the earlier layer and head; or the heads listed as LAYER.HEAD; or N random "
        "heads.",
        "Sandoval-Segura et al. 2504.03889", "heads:read_heads",
        "heads:honor:5%", "heads set to 0, the same in every sequence",
    ),
    ArmKind(
        "dynamic", "dynamic:SCORE:5% or dynamic:SCORE:low5%",
        "Sets heads to 0 in the sequences in which they are dormant, so that the heads differ between sequences. A "
        "head counts as dormant in a sequence if its score there is at most the 5 % quantile of the run, or at least "
        "the 95 % quantile if high values mean dormant. The quantile is taken over all pairs of a sequence and a "
        "head, with linear interpolation. The scores come from a scan of the held-out text in which no head is "
        "zeroed. The run's sequences must be as long as the held-out ones. Published shares of dormant heads are "
        "defined in this way.",
        "Sandoval-Segura et al. 2504.03889", "dynamic:read_dynamic",
        "dynamic:honor:5%", "heads set to 0 in the sequences where they are dormant",
    ),
    ArmKind(
        "value", "value:POSITIONS",
        "Sets the values at some positions to 0 in all heads. Queries still attend to these positions, but get "
        "nothing from them.",
        "Gu et al. 2410.10781", "value:read_value",
        "value:first1", "values at some positions set to 0",
    ),
    ArmKind(
        "keys", "keys:POSITIONS",
        "Hides the keys at some positions from all later queries, in every layer. A query still sees the key at its "
        "own position. The option --tokens of ablate is keys:first1.",
        "ours", "keys:read_keys",
        "keys:first1", "keys at some positions hidden from later queries",
    ),
    ArmKind(
        "window", "window:W+S, window:W+randomS, either with /full, then with /SCORE:50% or /randomN",
        "Lets every query see only the last W keys and the first S (or S random keys), as if a cache had evicted all "
        "others. With /full, only layers without a window of their own are changed. With a plan, only some KV heads "
        "are changed: those that a score of the run ranks as most dormant, or N random ones. The other KV heads keep "
        "their whole cache.",
        "Xiao et al. 2309.17453 (StreamingLLM), 2410.10819 (DuoAttention: the plan)", "window:read_window",
        "window:64+4", "queries see the last 64 keys and the first 4",
    ),
    ArmKind(
        "kv", "kv:BITS or kv:BITS+POSITIONS",
        "Rounds keys and values to the nearest of 2^BITS levels, which are evenly spaced from the smallest to the "
        "largest number. With POSITIONS, the keys and values at these positions stay in 16 bits, and do not count for "
        "the smallest and largest number. Each KV head has levels of its own: for keys, one set per channel over the "
        "sequence, after rotary embeddings; for values, one set per token over its channels. 16 bits change nothing.",
        "KVSink 2508.04257", "kv:read_kv",
        "kv:4+first1", "keys and values rounded to 4 bits, except at position 0",
    ),
    ArmKind(
        "acts", "acts:BITS/tensor or acts:BITS/token, either with +POSITIONS",
        "Rounds the inputs of all linear modules, except the next-token head, to the nearest whole number of steps. A "
        "step is the largest |x| of the sequence (tensor) or of the token, divided by 2^(BITS-1) - 1, so that equally "
        "many levels lie on each side of 0. With POSITIONS, the rows at these positions stay in 16 bits, and do not "
        "count for the largest |x|. Without POSITIONS, the same intervention is also measured with the sinks in 16 "
        "bits; the difference is d_sink.",
        "ours", "acts:read_acts",
        "acts:8/tensor", "inputs of linear modules rounded to 8 bits",
    ),
    ArmKind(
        "massive", "massive:zero or massive:mean, either with /first or /others",
        "Sets massive elements to 0, or to the mean of the massive elements of that channel in the other sequences. "
        "This mean is taken over first tokens for first tokens, and over later tokens for later ones; without such a "
        "mean the element is left unchanged. Only channels in which the run found massive activations are changed, at "
        "the input of the block in which the channel is first massive. An element is massive if its absolute value is "
        "> 100 and > 1000 x the median absolute value of the sequence there. All positions are changed, with /first "
        "only position 0, with /others only later positions.",
        "Sun et al. 2402.17762", "massive:read_massive",
        "massive:zero", "massive activations set to 0, or to their mean",
    ),
    ArmKind(
        "first-token", "first-token:TEXT or first-token:random",
        "Replaces the token at position 0 by TEXT, which must be one token, or by a token drawn from the vocabulary.",
        "Barbero et al. 2504.02732", "first_token:read_first_token",
        "first-token:random", "another token at position 0",
    ),
    ArmKind(
        "neuron", "neuron:L.N or neuron:L.random",
        "Sets neuron N of the MLP of layer L to 0 at every position, or a neuron drawn from that layer.",
        "Guo et al. 2410.13835, Yu et al. 2411.07191 (which neurons)", "neuron:read_neuron",
        "neuron:11.1229", "one neuron of an MLP set to 0",
    ),
    ArmKind(
        "map", "map:3.1+4.0 or map:layerL, either with /ridgeR",
        "Replaces the outputs of heads, where the output projection reads them, by the best affine map of what the "
        "layer's attention reads, token by token. The heads are listed as LAYER.HEAD, or are all heads of a layer. "
        "The loss that this adds comes from what these heads move between tokens. The map is fitted by least squares "
        "on up to 32 other sequences of the same data, none of which is measured. If several maps fit equally well, "
        "the smallest is taken. With /ridgeR, R times the squared size of the map is added to the mean squared error.",
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
        READERS.add(name, read, read.__module__)
        KINDS[name] = ArmKind(name, grammar, " ".join((read.__doc__ or "").split()), source)
        return read

    return declare


def read_arm(text: str) -> Arm:
    """Reads one arm. Raises SinkscopeError for an unknown kind, a rest that its kind cannot read, and another package's
    reader that fails or returns no arm."""
    from sinkscope.experiments.arms.arm import Arm

    name, _, rest = text.partition(":")
    if name not in READERS:
        kinds = f"{', '.join(READERS)}{did_you_mean(name, READERS)}"
        raise SinkscopeError(f"--arm {text!r}: no such kind of arm; choose one of {kinds}")
    read = READERS[name]
    try:
        arm = read(rest)
    except SinkscopeError as error:
        raise SinkscopeError(f"--arm {text!r}: {error}; write {written(name)}") from None
    except Exception as error:
        if READERS.ships(name):
            raise
        raise SinkscopeError(f"--arm {text!r}: {_owner(name)}'s reader fails: {first_line(error)}") from error
    if not isinstance(arm, Arm):
        raise SinkscopeError(f"--arm {text!r}: {_owner(name)}'s reader returns no Arm, but {type(arm).__name__}")
    if not isinstance(arm.name, str):
        raise SinkscopeError(f"--arm {text!r}: {_owner(name)}'s reader returns an Arm whose name is no text")
    return arm


def read_arms(given: Any) -> list[Arm]:
    """Arms from one or several names or Arms. Raises SinkscopeError for anything else, for none, and as `read_arm`."""
    from sinkscope.experiments.arms.arm import Arm

    several = [given] if isinstance(given, str | Arm) else given
    if not isinstance(several, Iterable):
        raise SinkscopeError(f"arms: a name, an Arm or a list of them is needed, not {type(given).__name__}")
    arms = [read_arm(arm) if isinstance(arm, str) else arm for arm in several]
    if not arms:
        raise SinkscopeError("nothing to measure: at least one arm is needed")
    for arm in arms:
        if not isinstance(arm, Arm):
            raise SinkscopeError(f"arms: a name or an Arm is needed, not {type(arm).__name__}")
    return arms


def _owner(name: str) -> str:
    return " and ".join(READERS.owners(name))


def written(name: str) -> str:
    """How the arms of a kind are written, with what POSITIONS are."""
    grammar = KINDS[name].grammar if name in KINDS else f"{name}:REST"
    return f"{grammar} with {POSITIONS}" if "POSITIONS" in grammar else grammar


def listed() -> list[tuple[str, str]]:
    """An arm of each kind and what it does, in a line each; of another package's kind the names of kind and package,
    which load nothing."""
    return [*(kind.line for kind in KINDS.values()), *_of_packages()]


def told() -> str:
    """The kinds in full, a paragraph each; of another package's kind the names of kind and package."""
    kinds = [f"{kind.grammar}: {kind.what}" for kind in KINDS.values()]
    others = [f"{written}: {whose}" for written, whose in _of_packages()]
    return "\n\n".join([*kinds, *others, f"POSITIONS: {POSITIONS}"])


def _of_packages() -> list[tuple[str, str]]:
    return [(f"{name}:REST", f"from the package {_owner(name)}") for name in READERS if name not in KINDS]


def number(text: str, what: str, least: int, most: int = 2**24) -> int:
    """Reads a whole number. Raises SinkscopeError, which names `what`, where it is none or outside least..most."""
    if not text.isascii() or not text.isdigit() or len(text) > 12 or not least <= int(text) <= most:
        raise SinkscopeError(f"{what} {text[:20]!r} is no whole number from {least} to {most:,}")
    return int(text)
