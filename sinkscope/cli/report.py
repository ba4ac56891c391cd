"""`sinkscope report`: writes runs as one HTML file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.cli.common import check_writable, say
from sinkscope.cli.options import TrustRemoteCode
from sinkscope.errors import SinkscopeError
from sinkscope.runs.folder import write_file

if TYPE_CHECKING:
    from sinkscope.comparison.compare_runs import Comparison
    from sinkscope.present.html.attention import AttentionMaps
    from sinkscope.runs.run import Run

CLEAREST = "clearest"
TEXT = "The ferry bell rang twice before the rope was loose."
"""What models read for --maps where no text is given: few enough tokens also for one that reads letters."""


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; two runs are also compared.", metavar="RUN")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The HTML file to write.")] = Path(
        "sinkscope.html"
    ),
    arms: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER", help="Folder that arms, evict, quant or ablate wrote for a run's model; may be repeated."
        ),
    ] = None,
    maps: Annotated[
        str | None,
        typer.Option(
            metavar="HEADS",
            help="Add attention maps of these heads. A run stores no maps: its model is loaded again, and reads "
            f"--text. LAYER.HEAD,... names heads. {CLEAREST} chooses eight: the two that attend most to the first "
            "token, to their own token and to the token before, and the two nearest to uniform attention.",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="With --maps: the text that the model reads, at most 64 tokens. [default: a short sentence]"),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write one HTML file that needs no network: answers, heat maps, profiles, every head's curves, a comparison.

    Example: sinkscope report runs/gemma -o gemma.html
    """
    from sinkscope.present.html.report import render_report
    from sinkscope.runs.run import load_run
    from sinkscope.runs.saved.arms import load_arms, placed

    heads = chosen_heads(maps)
    if maps is None and (text is not None or trust_remote_code):
        raise SinkscopeError(f"{'--text' if text is not None else '--trust-remote-code'} belongs to --maps")
    if text is not None and not text.strip():
        raise SinkscopeError(f"--text {text!r}: a text that the model can read is needed")
    check_writable(out)
    loaded = [load_run(path) for path in runs]
    saved = placed([load_arms(path) for path in arms or []], loaded)
    result = None
    if len(loaded) == 2:
        try:
            result = compared(*loaded)
        except SinkscopeError as error:
            say(f"warning: the runs are not compared: {error}")
    for run in loaded:
        check_heads(run, heads)
    shown = [] if maps is None else [maps_of_run(run, heads, text, trust_remote_code) for run in loaded]
    page = render_report(loaded, result, saved, shown)
    write_file(out, page)
    say(f"wrote {out} ({len(page.encode()) / 1e6:.2f} MB)")


def chosen_heads(asked: str | None) -> list[tuple[int, int]]:
    """The heads that --maps names; none for `clearest`. Raises SinkscopeError where it names none, or too many."""
    from sinkscope.present.html.attention import MOST_HEADS

    if asked in (None, CLEAREST):
        return []
    matches = [re.fullmatch(r"\s*(\d+)\.(\d+)\s*", part) for part in (asked or "").split(",")]
    heads = [(int(match[1]), int(match[2])) for match in matches if match is not None]
    if len(heads) < len(matches):
        raise SinkscopeError(f"--maps {asked!r}: name heads as LAYER.HEAD, e.g. 5.1,9.0, or say {CLEAREST}")
    if len(heads) > MOST_HEADS:
        raise SinkscopeError(f"--maps names {len(heads)} heads: a report shows at most {MOST_HEADS} of a run")
    return list(dict.fromkeys(heads))


def check_heads(run: Run, heads: list[tuple[int, int]]) -> None:
    """Raises SinkscopeError for a head that the run has not, before its model is loaded."""
    there = set(zip(run.heads["layer"], run.heads["head"], strict=True))
    for layer, head in heads:
        if (layer, head) not in there:
            last = max(there)
            raise SinkscopeError(
                f"--maps {layer}.{head}: {run.path or run.manifest.model.shown} has no such head; its heads go from "
                f"{'.'.join(map(str, min(there)))} to {'.'.join(map(str, last))}"
            )


def maps_of_run(run: Run, heads: list[tuple[int, int]], text: str | None, trust: bool) -> AttentionMaps:
    """Maps of `heads`, or of the clearest ones, by the run's model, which is loaded. Raises as `maps_of` does."""
    from sinkscope.cli.plot import maps_of
    from sinkscope.present.figures.maps import gallery_heads
    from sinkscope.present.html.attention import AttentionMaps

    wanted = heads or [(layer, head) for layer, head, _ in gallery_heads(run, 2)]
    read = TEXT if text is None else text
    return AttentionMaps(read, maps_of(run, read, wanted, [], trust))


def compared(a: Run, b: Run) -> Comparison:
    """Compares two runs: paired where both read the same sequences, else as separate samples, with a note why not.

    Raises SinkscopeError where the runs share no domain or no metric.
    """
    from sinkscope.comparison.compare_runs import NotPaired, compare

    try:
        return compare(a, b)
    except NotPaired as error:
        result = compare(a, b, paired=False)
        result.notes.insert(0, f"not paired: {error.reason}")
        return result
