"""`sinkscope scan`: parse, call, write, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.cli.common import BAD_INPUT, say
from sinkscope.cli.options import (
    AllowPickle,
    Device,
    DeviceMap,
    Dtype,
    Metrics,
    Revision,
    TrustRemoteCode,
    parse_batch_size,
    single,
    slug,
)
from sinkscope.cli.scan_job import Job, launched
from sinkscope.errors import in_one_line
from sinkscope.runs.defaults import DORMANT_RULE, EPSILON

if TYPE_CHECKING:
    from sinkscope.runs.run import Run


def scan(
    model: Annotated[
        list[str] | None,
        typer.Argument(help="Hub id, folder, .gguf file, or example:NAME; several in turn.", metavar="MODEL..."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="prose, code, multilingual, random, repeated, a .txt/.jsonl/.parquet[#FIELD] file, or "
            "hf:NAME[:CONFIG]/SPLIT#FIELD. Repeat it to compare domains. [default: prose]",
        ),
    ] = None,
    images: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Read pictures (png, jpg), one a sequence, not --data.")
    ] = None,
    audio: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Read recordings (wav), one a sequence, not --data.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="The text beside each picture, or what the decoder reads beside each recording.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens a sequence. [default: 256]")] = None,
    num_sequences: Annotated[int | None, typer.Option(help="Sequences for each --data. [default: 32]")] = None,
    bos: Annotated[
        list[str] | None,
        typer.Option(
            help="First token: auto (the tokenizer's habit), always, never. Repeat it to compare. [default: auto]"
        ),
    ] = None,
    batch_size: Annotated[
        str, typer.Option(help="Sequences a forward pass; auto halves when memory runs out.")
    ] = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    tp: Annotated[
        bool, typer.Option("--tp", help="In a launch of several processes: spread the heads, not the sequences.")
    ] = False,
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    seed: Annotated[int, typer.Option(help="Draws documents, and the tokens of random and repeated.")] = 0,
    epsilon: Annotated[float, typer.Option(help="Sink threshold on alpha_0.")] = EPSILON,
    dormant_rule: Annotated[str, typer.Option(help='"NAME<x" on a column of heads.csv.')] = DORMANT_RULE,
    smoothing: Annotated[
        bool, typer.Option("--smoothing", help="Write smoothing.csv too: does each head make tokens more alike?")
    ] = False,
    spectra: Annotated[
        int | None,
        typer.Option(help="First sequences that matrix_entropy is measured on. [default: as many as are cheap]"),
    ] = None,
    metrics: Metrics = None,
    no_self_check: Annotated[
        bool, typer.Option("--no-self-check", help="Skip the comparison with eager attention.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a scan that was killed.")] = False,
    names: Annotated[
        Path | None, typer.Option("--models", metavar="FILE", help="More models: a file of names, one a line.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder, or the folder of several. [default: runs/MODEL-SLUG]"),
    ] = None,
    formats: Annotated[str, typer.Option("--format", help="csv, or parquet for the tables in Parquet too.")] = "csv",
    force: Annotated[bool, typer.Option("--force", help="Replace a finished run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json alone to stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, warnings or summary; errors only.")] = False,
) -> None:
    """Watch every attention head while the model reads text once; write per-head and per-layer tables.

    Example: sinkscope scan example:gemma-3-270m --data prose --data code --out runs/gemma
    """
    from sinkscope.errors import SinkscopeError
    from sinkscope.runs.run import FORMATS

    if formats not in FORMATS:
        raise SinkscopeError(f"--format {formats!r}: one of {', '.join(FORMATS)}")
    processes = launched(device, tp)
    models = list(dict.fromkeys([*(model or []), *processes.on_main(lambda: names_in(names))]))
    if not models:
        raise SinkscopeError("no model: name one, or give --models FILE")
    options = {
        "data": data or None, "images": images, "audio": audio, "prompt": prompt, "seq_len": seq_len,
        "num_sequences": num_sequences,
        "batch_size": parse_batch_size(batch_size), "bos": single(bos) or "auto", "device": device,
        "device_map": device_map, "dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code,
        "allow_pickle": allow_pickle, "seed": seed, "epsilon": epsilon, "dormant_rule": dormant_rule,
        "smoothing": smoothing, "spectra": spectra, "metrics": metrics or [],
        "self_check": not no_self_check,
    }  # fmt: skip
    job = Job(options, resume, force, tuple({"csv", formats}), quiet, processes)
    if len(models) == 1:
        run, written = job.scan(models[0], out or Path("runs") / slug(models[0]))
        show(run, written, as_json, quiet)
        return
    scan_all(job, models, out or Path("runs"), as_json)


def scan_all(job: Job, models: list[str], folder: Path, as_json: bool) -> None:
    """Several models, each into its own folder. One that fails does not stop the rest; then the exit code is 2."""
    from sinkscope.runs.strict_json import to_json

    runs, failed = [], []
    for model in models:
        target = folder / slug(model)
        try:
            before = job.finished_before(target)
            if before is not None:
                say(f"{model}: finished before, in {target}")
                runs.append(before)
                continue
            run, written = job.scan(model, target)
        except typer.Exit:  # interrupted; typer derives it from RuntimeError
            raise
        except Exception as error:  # whatever it is, the others have their turn
            say(f"error: {model}: {in_one_line(error)}")
            failed.append(model)
            continue
        runs.append(run)
        if not as_json:
            show(run, written, False, job.quiet)
    if as_json:
        sys.stdout.write(to_json([run.summary.as_dict() for run in runs]))
    if failed:
        say(f"error: {len(failed)} of {len(models)} models failed: {', '.join(failed)}")
        raise typer.Exit(BAD_INPUT)


def names_in(path: Path | None) -> list[str]:
    """Names of models, one a line; blank lines and what follows # are left out. Raises SinkscopeError."""
    from sinkscope.errors import SinkscopeError

    if path is None:
        return []
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SinkscopeError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    return [name for line in lines if (name := line.partition("#")[0].strip())]


def show(run: Run, written: list[Path], as_json: bool, quiet: bool) -> None:
    """The summary to stdout; warnings to stderr."""
    if not quiet:
        for warning in run.manifest.warnings:
            say(f"warning: {warning}")
    if as_json:
        from sinkscope.runs.strict_json import to_json

        sys.stdout.write(to_json(run.summary.as_dict()))
    elif not quiet:
        from sinkscope.present.terminal.console import terminal_style
        from sinkscope.present.terminal.run import render_run

        sys.stdout.write(render_run(run, written, **terminal_style()))
