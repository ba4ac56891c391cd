"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from sinkscope.cli.help import FIRST, LOADED, MEASURED, READ, SPOT, WRITTEN
from sinkscope.runs.defaults import EPSILON

Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SPEC",
        help="Text: prose, code, multilingual, random, repeated, a .txt/.jsonl/.parquet[#FIELD] file, or "
        "hf:NAME[:CONFIG]/SPLIT#FIELD. Repeat to compare several texts. [default: prose]",
        rich_help_panel=FIRST,
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        metavar="T",
        help="Tokens per sequence. [default: 256, or the model's positions where fewer]",
        rich_help_panel=FIRST,
    ),
]
NumSequences = Annotated[
    int | None, typer.Option(metavar="N", help="Sequences for each --data. [default: 32]", rich_help_panel=FIRST)
]
Bos = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODE",
        help="BOS as first token: auto (as the tokenizer does), always, never. Repeat to compare. [default: auto]",
        rich_help_panel=READ,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="N", help="Seed that draws documents, and the tokens of random and repeated.", rich_help_panel=READ
    ),
]
BatchSize = Annotated[
    str,
    typer.Option(
        metavar="N",
        help="Sequences per forward pass; auto halves them when memory runs out.",
        rich_help_panel=LOADED,
    ),
]
DEVICES = "auto, cpu, cuda, cuda:N, mps."
DTYPES = "auto (the checkpoint's), float32, bfloat16, float16, float64."
Device = Annotated[str, typer.Option(metavar="DEVICE", help=DEVICES, rich_help_panel=LOADED)]
DeviceMap = Annotated[
    str | None,
    typer.Option(metavar="MAP", help="auto: spread the model over GPUs, CPU and disk.", rich_help_panel=LOADED),
]
Dtype = Annotated[str, typer.Option(metavar="DTYPE", help=DTYPES, rich_help_panel=LOADED)]
Revision = Annotated[
    str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of a hub model.", rich_help_panel=LOADED)
]
TRUST = "Run Python code that comes with the model."
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help=TRUST, rich_help_panel=LOADED)]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Load pickled weights, which can run code, if a model has no others.",
        rich_help_panel=LOADED,
    ),
]
ADAPTER = "Folder of a PEFT adapter (LoRA, IA3, ...) to put into the model."
Adapter = Annotated[Path | None, typer.Option(metavar="DIR", help=ADAPTER, rich_help_panel=LOADED)]
Epsilon = Annotated[
    float,
    typer.Option(
        metavar="EPS", help="A head has a sink where alpha_0 exceeds this, between 0 and 1.", rich_help_panel=MEASURED
    ),
]
METRICS = "Run a Python file and measure the metrics it defines, too; may be repeated."
Metrics = Annotated[list[Path] | None, typer.Option(metavar="FILE.py", help=METRICS, rich_help_panel=MEASURED)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=WRITTEN)]


@dataclass(frozen=True)
class TextScan:
    """How `scan` and `track` read text, load models and measure. Each field is an option of both."""

    data: Data = None
    seq_len: SeqLen = None
    num_sequences: NumSequences = None
    bos: Bos = None
    batch_size: BatchSize = "auto"
    device: Device = "auto"
    dtype: Dtype = "auto"
    trust_remote_code: TrustRemoteCode = False
    allow_pickle: AllowPickle = False
    seed: Seed = 0
    epsilon: Epsilon = EPSILON

    def settings(self) -> dict[str, Any]:
        """The options under the names, and with the values, that `sinkscope.scan` takes."""
        values, bos = {field.name: getattr(self, field.name) for field in fields(self)}, single(self.bos)
        return values | {
            "data": self.data or None, "bos": "auto" if bos is None else bos,
            "batch_size": parse_batch_size(self.batch_size),
        }  # fmt: skip


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each parameter of a command that is a dataclass by one command-line option for each of its fields.

    Raises SinkscopeError for an option that the command then has twice, as a question of another package may bring.
    """
    from sinkscope.errors import SinkscopeError

    signature = inspect.signature(command, eval_str=True)
    gathered: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        made = {
            name: kind(**{field.name: arguments.pop(field.name) for field in fields(kind)})
            for name, kind in gathered.items()
        }
        command(**made, **arguments)

    options = []
    for name, parameter in signature.parameters.items():
        options += (
            _options_of(parameter.annotation) if name in gathered else [parameter.replace(kind=parameter.KEYWORD_ONLY)]
        )
    names = [option.name for option in options]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SinkscopeError(f"the option {twice} of a question (--measure) is one of every scan: rename it")
    run.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    return run


def _options_of(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(kind)
    ]


def slug(model: str, parts: int = 1) -> str:
    """The MODEL-SLUG of runs/MODEL-SLUG: a hub id with `--` for its slash, the last parts of a path, `example-NAME`."""
    if Path(model).exists():
        model = "/".join(Path(model).resolve().parts[-parts:])
    return re.sub(r"[^\w.-]+", "-", model.replace("/", "--")).strip("-.") or "model"


def slugs(models: list[str]) -> dict[str, str]:
    """The slug of each of several models. Where folders have the same name, their parents' names stand before it.

    Raises SinkscopeError where two models would be written to the same folder all the same.
    """
    from sinkscope.errors import SinkscopeError

    named = {model: slug(model) for model in models}
    for parts in (2, 3, 4):
        shared = _clashing(named)
        named |= {model: slug(model, parts) for model in shared}
    shared = _clashing(named)
    if shared:
        raise SinkscopeError(
            f"{shared[0]} and {shared[1]} would both be written to the folder {named[shared[0]]}: scan them one by "
            "one, each with an --out of its own"
        )
    return named


def _clashing(named: dict[str, str]) -> list[str]:
    """Models whose slug another has too; some file systems do not tell upper from lower case. Namesakes follow."""
    times = Counter(name.casefold() for name in named.values())
    return sorted(
        (model for model in named if times[named[model].casefold()] > 1), key=lambda model: named[model].casefold()
    )


def single(values: list[str] | None) -> str | list[str] | None:
    """The one value of an option that may be repeated, or all of them."""
    return values[0] if values is not None and len(values) == 1 else values or None


def parse_lengths(text: str | None) -> list[int] | None:
    """The numbers of `A,B,...`; None where the option is not given. Raises SinkscopeError for anything else."""
    from sinkscope.errors import SinkscopeError

    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SinkscopeError(
            f"--lengths {text!r}: write numbers of tokens with commas between, such as 64,256"
        ) from None


def parse_batch_size(text: str) -> int | None:
    """Reads `--batch-size`: a number, or None for `auto`. Raises SinkscopeError for any other text."""
    from sinkscope.errors import SinkscopeError

    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise SinkscopeError(f"--batch-size {text!r}: write a number or auto") from None


@dataclass(frozen=True)
class SpotScan:
    """How a model that is named in place of a run is scanned. Each field is an option of those commands."""

    device: Annotated[str, typer.Option(metavar="DEVICE", help=DEVICES, rich_help_panel=SPOT)] = "auto"
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help=DTYPES, rich_help_panel=SPOT)] = "auto"
    adapter: Annotated[Path | None, typer.Option(metavar="DIR", help=ADAPTER, rich_help_panel=SPOT)] = None
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help=TRUST, rich_help_panel=SPOT)] = False
    metrics: Annotated[list[Path] | None, typer.Option(metavar="FILE.py", help=METRICS, rich_help_panel=SPOT)] = None
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print no progress and no warnings.", rich_help_panel=WRITTEN)
    ] = False
