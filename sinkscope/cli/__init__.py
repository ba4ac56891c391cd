"""The command line: one thin file per command.

Data goes to stdout, everything else to stderr. Exit codes: 0, 1 (failed check), 2 (bad input), 130 (Ctrl-C).
"""

from __future__ import annotations

import sys

import typer

from sinkscope.cli import (
    ablate,
    arms,
    atlas,
    baseline,
    bench,
    card,
    check,
    compare,
    evict,
    examples,
    export,
    figures,
    metrics,
    plot,
    quant,
    report,
    scan,
    schema,
    show,
    track,
    trigger,
)
from sinkscope.cli.common import (
    BAD_INPUT,
    discard_stdout,
    encode_anything,
    guarded,
    open_closed_streams,
    say,
    warn_in_one_line,
)
from sinkscope.cli.help import Command, Group
from sinkscope.engine.launch import leave
from sinkscope.engine.launcher import hush
from sinkscope.errors import SinkscopeError

app = typer.Typer(
    name="sinkscope",
    cls=Group,
    help="Measure attention sinks, dormant heads and massive activations in pretrained transformers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("scan", cls=Command)(guarded(scan.scan, spreads=True))
app.command("track", cls=Command)(guarded(track.track))
app.command("ablate", cls=Command)(guarded(ablate.ablate, spreads=True))
app.command("arms", cls=Command)(guarded(arms.arms, spreads=True))
app.command("evict", cls=Command)(guarded(evict.evict, spreads=True))
app.command("quant", cls=Command)(guarded(quant.quant, spreads=True))
app.command("show", cls=Command)(guarded(show.show))
app.command("compare", cls=Command)(guarded(compare.compare))
app.command("baseline", cls=Command)(guarded(baseline.baseline))
app.command("check", cls=Command)(guarded(check.check))
app.command("export", cls=Command)(guarded(export.export))
app.command("plot", cls=Command)(guarded(plot.plot))
app.add_typer(figures.app, name="figures")
app.command("report", cls=Command)(guarded(report.report))
app.command("atlas", cls=Command)(guarded(atlas.atlas))
app.command("card", cls=Command)(guarded(card.card))
app.command("bench", cls=Command)(guarded(bench.bench))
app.command("metrics", cls=Command)(guarded(metrics.metrics))
app.command("schema", cls=Command)(guarded(schema.schema))
app.command("examples", cls=Command)(guarded(examples.examples))
app.add_typer(trigger.app, name="trigger")


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    """Measure attention sinks, dormant heads and massive activations in pretrained transformers.

    Example: sinkscope scan example:gemma-3-270m
    """
    if version:
        from sinkscope import __version__

        sys.stdout.write(f"{__version__}\n")
        raise typer.Exit


def main() -> None:
    """Entry point of the `sinkscope` command.

    It flushes stdout itself, because a flush that fails while Python exits would end with code 120.
    """
    open_closed_streams()
    try:
        hush()
    except SinkscopeError as error:
        say(f"error: {error}")
        sys.exit(BAD_INPUT)
    encode_anything()
    warn_in_one_line()
    code: str | int | None = 0
    stdout = sys.stdout
    try:
        try:
            app()
        except SystemExit as stop:
            code = stop.code
            if sys.stdout is not stdout:  # typer met a pipe without a reader, replaced stdout and ended with 1
                sys.stdout, code = stdout, 0
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has gone; the exit code stays
        discard_stdout()
    except OSError as error:  # such as a full disk; exit code 1 is kept for a failed check
        say(f"error: {error.strerror or error}")
        discard_stdout()
        code = BAD_INPUT
    sys.exit(leave(code if isinstance(code, int) else int(code is not None)))
