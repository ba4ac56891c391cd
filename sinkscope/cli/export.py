"""`sinkscope export`: writes tables for papers, and lists of heads for other tools."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.cli.common import check_writable, say
from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.present.paper.format import FORMATS, Format, format_of_file
from sinkscope.present.text import readable
from sinkscope.runs.folder import write_file

if TYPE_CHECKING:
    from sinkscope.runs.selections import SelectedWords

DEFAULT = "markdown"
STREAMING, DUO = "streaming", "duo"
DATASET, IDS = "hf-dataset", "ids"


def export(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders; several runs make a table of models.", metavar="RUN")
    ],
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help=f"{', '.join(FORMATS)}; {DATASET}: a folder of "
            f"all tables; {DUO} for --heads {STREAMING}; {IDS} for --tokens. [default: by the extension of --out, "
            f"else {DEFAULT}]",
        ),
    ] = None,
    level: Annotated[
        str | None, typer.Option(help="Rows: head, layer, model. [default: layer for one run, model for several]")
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="Column; may be repeated. [default: a few for each level]")
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            help="dormant or sink: write these heads of each layer as JSON, instead of a table. streaming: write a "
            "folder that DuoAttention and kvpress load."
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Write tokens as JSON, instead of a table: attention sinks (sink), tokens similar to the first "
            "one's state (state), or tokens with massive activations (massive)."
        ),
    ] = None,
    min_rate: Annotated[
        float | None,
        typer.Option(
            help="For --tokens: list a token if it is what is asked for in at least this share of its occurrences "
            "beyond position 0; with 0, in any of them. [default: 0.5]"
        ),
    ] = None,
    domain: Annotated[
        str | None, typer.Option(help="For --tokens: the dataset whose tokens are listed. [default: all of the run's]")
    ] = None,
    caption: Annotated[str | None, typer.Option(help="LaTeX: put the table into a float with this caption.")] = None,
    label: Annotated[str | None, typer.Option(help="LaTeX: the name that \\ref{NAME} takes.", metavar="NAME")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write to FILE instead of stdout.")
    ] = None,
) -> None:
    """Print runs as a table for a paper, the sources of their metrics as BibTeX, or a list of heads or tokens.

    Example: sinkscope export runs/gemma --format latex --metric bos_mass --metric entropy -o table.tex
    """
    if min_rate is not None and tokens is None:
        raise SinkscopeError("--min-rate belongs to --tokens")
    if domain is not None and tokens is None:
        raise SinkscopeError("--domain belongs to --tokens")
    if form == DATASET:
        write_dataset(runs, out, bool(heads or tokens or level or metric))
    elif heads == STREAMING or form == DUO:
        write_streaming(runs, heads, form, out, bool(level or metric))
    elif heads is not None or tokens is not None or form == IDS:
        check_floating(None, caption, label)
        put(out, list_of(runs, out, heads, tokens, form, bool(level or metric), min_rate, domain))
    else:
        put(out, table_of(runs, out, form, level, metric, caption, label))


def put(out: Path | None, content: str | bytes) -> None:
    """Writes to the file, or to stdout where none is named."""
    if out is not None:
        write_file(out, content)
        say(f"wrote {out}")
    else:
        text = content if isinstance(content, str) else content.decode()
        sys.stdout.write(readable(text) if sys.stdout.isatty() else text)


def table_of(
    runs: list[Path], out: Path | None, form: str | None, level: str | None, metric: list[str] | None,
    caption: str | None, label: str | None,
) -> str | bytes:  # fmt: skip
    """The runs as a table in a format. Raises SinkscopeError for options that clash, or a file not to be written."""
    from sinkscope.runs.paper_table import paper_table, sources_table
    from sinkscope.runs.run import load_run

    check_writable(out)
    chosen = choose_format(form, out)
    if chosen.binary and out is None:
        raise SinkscopeError(f"--format {chosen.name} is binary: name a file with -o")
    check_floating(chosen, caption, label)
    loaded = [load_run(path) for path in runs]
    whole = chosen.sources and not (level or metric)
    table = sources_table(loaded) if whole else paper_table(loaded, level, metric)
    return chosen.written(replace(table, caption=caption, label=label))


def check_floating(chosen: Format | None, caption: str | None, label: str | None) -> None:
    """Raises SinkscopeError for a caption or a label of what is no LaTeX table, and for a label that breaks TeX."""
    options = [name for name, value in (("--caption", caption), ("--label", label)) if value is not None]
    if options and (chosen is None or chosen.name != "latex"):
        raise SinkscopeError(f"{options[0]} belongs to --format latex")
    if label is not None and not re.fullmatch(r"[\w:./+-]+", label, re.ASCII):
        raise SinkscopeError(f"--label {label!r}: letters, digits and any of _ : . / + - are needed, e.g. tab:sinks")


def write_streaming(runs: list[Path], heads: str | None, form: str | None, out: Path | None, table: bool) -> None:
    """Writes the streaming scores of a run's KV heads as a folder. Raises SinkscopeError where other options clash."""
    from sinkscope.runs.run import load_run
    from sinkscope.runs.selections import write_pattern

    if heads != STREAMING or form not in (None, DUO):
        raise SinkscopeError(f"--heads {STREAMING} and --format {DUO} belong together: give no other")
    if table:
        raise SinkscopeError(f"--heads {STREAMING} writes a folder, not a table: it takes no --level or --metric")
    if out is None or len(runs) > 1:
        raise SinkscopeError(f"--heads {STREAMING} writes a folder: name one run, and the folder with -o")
    for warning in write_pattern(load_run(runs[0]), out):
        say(f"warning: {warning}")
    say(f"wrote {out}")


def choose_format(name: str | None, out: Path | None) -> Format:
    """The format called `name`; without a name, the format of the file's extension; without one, Markdown.

    Raises SinkscopeError for an unknown name, or an extension of no format."""
    if name is not None:
        check_choice("--format", name, [*FORMATS, DATASET, DUO, IDS])
        return FORMATS[name]
    form = None if out is None else format_of_file(out)
    if form is None and out is not None and out.suffix:
        known = ", ".join(extension for name in FORMATS for extension in FORMATS[name].extensions)
        raise SinkscopeError(f"-o {out}: no format has this extension; give one of {known}, or --format")
    return form or FORMATS[DEFAULT]


def check_choice(option: str, value: str, choices: list[str]) -> None:
    """Raises SinkscopeError for a value that is none of the choices."""
    if value not in choices:
        raise SinkscopeError(f"{option} {value!r}: choose one of {', '.join(choices)}{did_you_mean(value, choices)}")


def write_dataset(runs: list[Path], out: Path | None, more: bool) -> None:
    """Writes runs as a dataset folder of the model hub. Raises SinkscopeError where other options clash."""
    from sinkscope.present.card import CARD, FILES, dataset_files
    from sinkscope.runs.folder import FolderKind
    from sinkscope.runs.run import load_run

    if more:
        raise SinkscopeError(
            f"--format {DATASET} writes every table: it takes no --heads, --tokens, --level or --metric"
        )
    if out is None:
        raise SinkscopeError(f"--format {DATASET} writes a folder: name it with -o")
    kind = FolderKind("dataset", FILES, lambda folder: (folder / CARD).is_file() or None)
    kind.check(out, force=True)
    files = dataset_files([load_run(path) for path in runs])

    def fill(work: Path) -> None:
        for name, content in files.items():
            (work / name).write_bytes(content)

    kind.write(out, force=True, fill=fill)
    say(f"wrote {out}")


def list_of(
    runs: list[Path], out: Path | None, heads: str | None, tokens: str | None, form: str | None, table: bool,
    min_rate: float | None, domain: str | None,
) -> str:  # fmt: skip
    """The selected heads or tokens of one run, with model and rule, as JSON; with the format `ids`, the tokens' ids,
    one a line. Raises SinkscopeError for options that clash, for several runs, and for ids of several streams, which
    may have other vocabularies."""
    from sinkscope.runs.run import load_run
    from sinkscope.runs.schema.base import to_json
    from sinkscope.runs.selections import MIN_RATE, SELECTIONS, WORDS, described_heads, selected_tokens

    if heads is not None:
        check_choice("--heads", heads, [*SELECTIONS, STREAMING])
    if heads is not None and tokens is not None:
        raise SinkscopeError("--heads and --tokens write a list each: give one of them")
    if form == IDS and tokens is None:
        raise SinkscopeError(f"--format {IDS} writes the ids of --tokens: give sink, state or massive")
    option = "--tokens" if heads is None else "--heads"
    if form not in (None, IDS) or table:
        raise SinkscopeError(f"{option} writes a list, not a table: it takes no --format, --level or --metric")
    check_writable(out)
    if len(runs) > 1:
        raise SinkscopeError(f"{option} takes one run")
    run, least = load_run(runs[0]), MIN_RATE if min_rate is None else min_rate
    selected = selected_tokens(run, str(tokens), least, domain) if heads is None else described_heads(run, heads)
    if form is None:
        return to_json(selected)
    if len(selected) > 1:
        raise SinkscopeError(
            f"--format {IDS}: the run has the streams {', '.join(selected)}; write JSON, without --format"
        )
    (only,) = selected.values()
    words = WORDS[str(tokens)]
    if apart := len(only["ids_at_position_0_only"]):
        say(f"left out: {_counted(apart, words)} at position 0 only; without --format, the JSON has them")
    if rare := len(only["ids_below_min_rate"]):
        of = f"{least:.4g} of {'its' if rare == 1 else 'their'} occurrences"
        say(f"left out: {_counted(rare, words)} in fewer than {of}; --min-rate 0 lists them")
    return "".join(f"{token}\n" for token in only["ids"])


def _counted(count: int, words: SelectedWords) -> str:
    return f"1 token that {words.one}" if count == 1 else f"{count} tokens that {words.several}"
