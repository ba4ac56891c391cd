"""`sinkscope scan`: parse, call, write, print."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.cli.common import INTERRUPTED, say

if TYPE_CHECKING:
    from sinkscope.run import Run


def scan(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or example:NAME.", metavar="MODEL")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="prose, code, multilingual, random, repeated, a .txt/.jsonl/.parquet[#FIELD] file, or "
            "hf:NAME[:CONFIG]/SPLIT#FIELD. Repeat it to compare domains. [default: prose]",
        ),
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens a sequence. [default: 256]")] = None,
    num_sequences: Annotated[int | None, typer.Option(help="Sequences for each --data. [default: 32]")] = None,
    bos: Annotated[str, typer.Option(help="First token: auto (the tokenizer's habit), always, never.")] = "auto",
    batch_size: Annotated[
        str, typer.Option(help="Sequences a forward pass; auto halves when memory runs out.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, mps.")] = "auto",
    device_map: Annotated[str | None, typer.Option(help="auto: spread the model over GPUs, CPU and disk.")] = None,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the model's.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load pickled weights where there are no others.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Draws documents, and the tokens of random and repeated.")] = 0,
    epsilon: Annotated[float, typer.Option(help="Sink threshold on alpha_0.")] = 0.3,
    dormant_rule: Annotated[str, typer.Option(help='"NAME<x" on a column of heads.csv.')] = "honor<0.4",
    smoothing: Annotated[
        bool, typer.Option("--smoothing", help="Write smoothing.csv too: does each head make tokens more alike?")
    ] = False,
    no_self_check: Annotated[
        bool, typer.Option("--no-self-check", help="Skip the comparison with eager attention.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Run folder. [default: runs/MODEL-SLUG]")] = None,
    formats: Annotated[str, typer.Option("--format", help="csv, or parquet for the tables in Parquet too.")] = "csv",
    force: Annotated[bool, typer.Option("--force", help="Replace a finished run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json alone to stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, warnings or summary; errors only.")] = False,
) -> None:
    """Watch every attention head while the model reads text once; write per-head and per-layer tables.

    Example: sinkscope scan example:gemma-3-270m --data prose --data code --out runs/gemma
    """
    from sinkscope.errors import SinkscopeError
    from sinkscope.run import FORMATS, check_target, finished

    if formats not in FORMATS:
        raise SinkscopeError(f"--format {formats!r}: one of {', '.join(FORMATS)}")
    target = out or Path("runs") / slug(model)
    check_target(target, force)
    size = parse_batch_size(batch_size)
    from sinkscope.engine import Interrupted
    from sinkscope.engine import scan as measure
    from sinkscope.present.progress import progress_bar

    interrupted = False
    with progress_bar(quiet) as progress:
        try:
            run = measure(
                model, data=data or None, seq_len=seq_len, num_sequences=num_sequences, batch_size=size, bos=bos,
                device=device, device_map=device_map, dtype=dtype, revision=revision,
                trust_remote_code=trust_remote_code, allow_pickle=allow_pickle, seed=seed, epsilon=epsilon,
                dormant_rule=dormant_rule, smoothing=smoothing, self_check=not no_self_check, progress=progress,
            )  # fmt: skip
        except Interrupted as stopped:
            if stopped.run is None:
                raise
            run, interrupted = stopped.run, True
            if finished(target):  # --force meant to replace it by a whole run, not by a part
                target = target.with_name(f"{target.name}-interrupted")
    run.manifest["command"] = shlex.join(["sinkscope", *sys.argv[1:]])
    written = run.save(target, force=force, formats=tuple({"csv", formats}))
    show(run, written, as_json, quiet)
    if interrupted:
        say(f"interrupted: what was done ({run.manifest['sequences_done']} sequences) is in {target}")
        raise typer.Exit(INTERRUPTED)


def show(run: Run, written: list[Path], as_json: bool, quiet: bool) -> None:
    """The summary to stdout; warnings to stderr."""
    if not quiet:
        for warning in run.manifest["warnings"]:
            say(f"warning: {warning}")
    if as_json:
        from sinkscope.run import to_json

        sys.stdout.write(to_json(run.summary))
    elif not quiet:
        from sinkscope.present.terminal import render_run, terminal_style

        sys.stdout.write(render_run(run, written, **terminal_style()))


def slug(model: str) -> str:
    """runs/MODEL-SLUG: the hub id with its slash as `--`, the last part of a path, the example's name."""
    if Path(model).exists():
        model = Path(model).resolve().name
    return re.sub(r"[^\w.-]+", "-", model.replace("/", "--")).strip("-.") or "model"


def parse_batch_size(text: str) -> int | None:
    from sinkscope.errors import SinkscopeError

    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise SinkscopeError(f"--batch-size {text!r}: a number or auto") from None
