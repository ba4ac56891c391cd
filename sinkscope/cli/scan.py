"""`sinkscope scan`: reads the options, scans each model, writes its folder and prints its summary."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.cli.common import BAD_INPUT, say
from sinkscope.cli.options import (
    Adapter,
    AllowPickle,
    Device,
    DeviceMap,
    Dtype,
    Metrics,
    Revision,
    TrustRemoteCode,
    parse_batch_size,
    parse_lengths,
    single,
    slug,
    slugs,
)
from sinkscope.cli.scan_job import Job, launched
from sinkscope.errors import in_one_line
from sinkscope.runs.defaults import DORMANT_RULE, EPSILON, SINKS, WINDOW
from sinkscope.runs.schema.measures import MEASURES

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

MEASURES_TOLD = ", ".join(f"{each.name} ({each.what})" for each in MEASURES.values())


def scan(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            help="Hub id, folder, .gguf file, or example:NAME; several are scanned in turn.", metavar="MODEL"
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Text: prose, code, multilingual, random, repeated, a .txt/.jsonl/.parquet[#FIELD] file, or "
            "hf:NAME[:CONFIG]/SPLIT#FIELD. Repeat to compare domains. [default: prose]",
        ),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Read pictures (png, jpg) instead of --data, one per sequence."),
    ] = None,
    audio: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Read recordings (wav) instead of --data, one per sequence.")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Text that goes with each picture, or that the decoder reads with each recording."),
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence. [default: 256]")] = None,
    num_sequences: Annotated[int | None, typer.Option(help="Sequences for each --data. [default: 32]")] = None,
    bos: Annotated[
        list[str] | None,
        typer.Option(
            help="BOS as first token: auto (as the tokenizer does), always, never. Repeat to compare. [default: auto]"
        ),
    ] = None,
    first: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN",
            help="What stands first instead: bos, bosxN (N times), none, random, or a text of one token. Repeat to "
            "compare: the same text begins with each.",
        ),
    ] = None,
    prepend: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Put N random tokens before the first token. Repeat to compare; 0 is none."),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option(metavar="N", help="Let the model write N tokens after each sequence, and measure them too."),
    ] = None,
    batch_size: Annotated[
        str, typer.Option(help="Sequences per forward pass; auto halves them when memory runs out.")
    ] = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    tp: Annotated[
        bool,
        typer.Option("--tp", help="With several processes: split each layer's heads among them, not the sequences."),
    ] = False,
    dtype: Dtype = "auto",
    revision: Revision = None,
    adapter: Adapter = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    seed: Annotated[int, typer.Option(help="Seed that draws documents, and the tokens of random and repeated.")] = 0,
    epsilon: Annotated[float, typer.Option(help="A head has a sink where alpha_0 exceeds this.")] = EPSILON,
    dormant_rule: Annotated[
        str, typer.Option(help='Which heads are dormant: "NAME<x" or "NAME>x" on a column of heads.csv.')
    ] = DORMANT_RULE,
    measure: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Measure more: {MEASURES_TOLD}, or all. Repeat for several."),
    ] = None,
    window: Annotated[
        int, typer.Option(metavar="N", help="Recent keys that a streaming cache keeps, for --measure streaming.")
    ] = WINDOW,
    sinks: Annotated[
        int, typer.Option(metavar="N", help="First keys that a streaming cache keeps, for --measure streaming.")
    ] = SINKS,
    smoothing: Annotated[bool, typer.Option("--smoothing", hidden=True)] = False,
    spectra: Annotated[
        int | None,
        typer.Option(help="Measure matrix_entropy on the first N sequences. [default: as many as are cheap]"),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Prefixes of length_curve.csv, from one pass. [default: 64,128,256,...]"),
    ] = None,
    metrics: Metrics = None,
    no_self_check: Annotated[
        bool, typer.Option("--no-self-check", help="Skip the comparison with eager attention.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a scan that was interrupted.")] = False,
    names: Annotated[
        Path | None, typer.Option("--models", metavar="FILE", help="File with the names of more models, one per line.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder to write; the parent of all, with several models. [default: runs/MODEL-SLUG]"),
    ] = None,
    formats: Annotated[
        str, typer.Option("--format", help="csv, or parquet to write the tables as Parquet too.")
    ] = "csv",
    force: Annotated[bool, typer.Option("--force", help="Replace a finished run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json alone to stdout.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print errors only: no progress, warnings or summary.")
    ] = False,
) -> None:
    """Watch every attention head while the model reads text once; write per-head and per-layer tables.

    Example: sinkscope scan example:gemma-3-270m --data prose --data code --out runs/gemma
    """
    from sinkscope.errors import SinkscopeError
    from sinkscope.runs.run import FORMATS

    if formats not in FORMATS:
        raise SinkscopeError(f"--format {formats!r}: choose one of {', '.join(FORMATS)}")
    processes = launched(device, tp)
    models = list(dict.fromkeys([*(model or []), *processes.on_main(lambda: names_in(names))]))
    if not models:
        raise SinkscopeError("no model: name one, or give --models FILE")
    options = {
        "data": data or None, "images": images, "audio": audio, "prompt": prompt, "seq_len": seq_len,
        "num_sequences": num_sequences, "batch_size": parse_batch_size(batch_size), "bos": single(bos) or "auto",
        "first": first or (), "prepend": prepend or (), "generate": generate, "device": device,
        "device_map": device_map, "dtype": dtype, "revision": revision, "adapter": adapter,
        "trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle, "seed": seed, "epsilon": epsilon,
        "dormant_rule": dormant_rule, "measure": measure or [], "window": window, "sinks": sinks,
        "smoothing": smoothing, "spectra": spectra, "lengths": parse_lengths(lengths), "metrics": metrics or [],
        "self_check": not no_self_check,
    }  # fmt: skip
    job = Job(options, resume, force, tuple({"csv", formats}), quiet, processes)
    if len(models) == 1:
        name = slug(models[0]) if adapter is None else f"{slug(models[0])}--{slug(str(adapter))}"
        run, written = job.scan(models[0], out or Path("runs") / name)
        show(run, written, as_json, quiet)
        return
    scan_all(job, models, out or Path("runs"), as_json)


def scan_all(job: Job, models: list[str], folder: Path, as_json: bool) -> None:
    """Scans several models, each into its own folder. One that fails stops no other; the exit code is then 2."""
    from sinkscope.runs.strict_json import to_json

    runs, failed = [], []
    for model, name in slugs(models).items():
        try:
            run, written = job.scan(model, folder / name)
        except typer.Exit:  # the scan was interrupted; typer derives Exit from RuntimeError
            raise
        except Exception as error:  # whatever it is, the other models are still scanned
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
    """Reads model names from a file, one per line, without what follows a #. Raises SinkscopeError."""
    from sinkscope.errors import SinkscopeError

    if path is None:
        return []
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SinkscopeError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    return [name for line in lines if (name := line.partition("#")[0].strip())]


def show(run: Run, written: list[Path], as_json: bool, quiet: bool) -> None:
    """Prints the summary to stdout and the warnings to stderr."""
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
