"""Options that several commands share."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, mps.")]
DeviceMap = Annotated[str | None, typer.Option(help="auto: spread the model over GPUs, CPU and disk.")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
Adapter = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of a PEFT adapter (LoRA, IA3, ...) to put into the model.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
Metrics = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE.py", help="Run a Python file and measure the metrics it defines, too; may be repeated."),
]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Load pickled weights where a model has no others.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


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
    from sinkscope.errors import SinkscopeError

    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise SinkscopeError(f"--batch-size {text!r}: write a number or auto") from None
