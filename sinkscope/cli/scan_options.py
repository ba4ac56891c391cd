"""The options of `sinkscope scan` beside those that it shares with `track`."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkscope.cli.help import LOADED, MEASURED, READ, WRITTEN, listed
from sinkscope.cli.options import Adapter, DeviceMap, Metrics, Revision, parse_lengths
from sinkscope.engine.launcher import size
from sinkscope.errors import SinkscopeError
from sinkscope.runs.defaults import DORMANT_RULE
from sinkscope.runs.questions import QUESTIONS, Option, Question, declared_options

MEASURES_TOLD = listed(
    [*((question.name, question.asks) for question in QUESTIONS.values()), ("all", "all that model and inputs allow")]
)


@dataclass(frozen=True)
class MoreOfScan:
    """What `scan` asks beside TextScan. Each field is an option."""

    first: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN",
            help="Put this before the text, in place of BOS: bos, bosxN (N times), none, random, or a text of "
            "one token. Repeat to compare: the same text follows each.",
            rich_help_panel=READ,
        ),
    ] = None
    prepend: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            help="Put N random tokens before the first token. Repeat to compare; 0 is none.",
            rich_help_panel=READ,
        ),
    ] = None
    generate: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Let the model write N tokens after each sequence, and measure them too.",
            rich_help_panel=READ,
        ),
    ] = None
    images: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Read pictures (png, jpg) instead of --data, one per sequence.", rich_help_panel=READ
        ),
    ] = None
    audio: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Read recordings (wav) instead of --data, one per sequence.", rich_help_panel=READ
        ),
    ] = None
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Text that goes with each picture, or that the decoder reads with each recording.",
            rich_help_panel=READ,
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(help="What tables, figures and pages call the model. [default: its id]", rich_help_panel=WRITTEN),
    ] = None
    names: Annotated[
        Path | None,
        typer.Option(
            "--models",
            metavar="FILE",
            help="File with the names of more models, one per line.",
            rich_help_panel=LOADED,
        ),
    ] = None
    device_map: DeviceMap = None
    tp: Annotated[
        bool,
        typer.Option(
            "--tp",
            help="With several processes: split each layer's heads among them, not the sequences.",
            rich_help_panel=LOADED,
        ),
    ] = False
    revision: Revision = None
    adapter: Adapter = None
    dormant_rule: Annotated[
        str,
        typer.Option(
            metavar="RULE",
            help='Which heads are dormant: "NAME<x" or "NAME>x" on a column of heads.csv.',
            rich_help_panel=MEASURED,
        ),
    ] = DORMANT_RULE
    measure: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Measure more; may be repeated.\n\n{MEASURES_TOLD}",
            rich_help_panel=MEASURED,
        ),
    ] = None
    smoothing: Annotated[bool, typer.Option("--smoothing", hidden=True)] = False
    spectra: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Measure columns that need singular values (ranks, matrix entropy) on the first N sequences "
            "only. [default: as many as are cheap]",
            rich_help_panel=MEASURED,
        ),
    ] = None
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Also measure alpha_0 over the first A, B, ... tokens, in the same pass (length_curve.csv). "
            "[default: 64,128,256,...]",
            rich_help_panel=MEASURED,
        ),
    ] = None
    metrics: Metrics = None
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="End with an error where attention of the model cannot be read or a metric of --metrics fails.",
            rich_help_panel=MEASURED,
        ),
    ] = False
    no_self_check: Annotated[
        bool,
        typer.Option("--no-self-check", help="Skip the comparison with eager attention.", rich_help_panel=MEASURED),
    ] = False

    def check_launch(self, device: str) -> None:
        """Raises SinkscopeError where --tp does not fit the launch or --device."""
        if self.tp and size() == 1:
            raise SinkscopeError("--tp needs several processes: torchrun --nproc-per-node N -m sinkscope scan ... --tp")
        if self.tp and device != "auto":
            raise SinkscopeError(
                "--tp gives each process a GPU of its own (or the CPU where there is none): leave out --device"
            )

    def settings(self) -> dict[str, Any]:
        """The options under the names, and with the values, that `sinkscope.scan` takes."""
        names = (
            "name",
            "images",
            "audio",
            "prompt",
            "device_map",
            "revision",
            "adapter",
            "generate",
            "dormant_rule",
            "smoothing",
            "spectra",
        )
        values = {name: getattr(self, name) for name in names}
        repeated = {name: getattr(self, name) or [] for name in ("first", "prepend", "measure", "metrics")}
        return values | repeated | {"lengths": parse_lengths(self.lengths), "self_check": not self.no_self_check}


def _option_of(question: Question, option: Option) -> tuple[str, Any, Any]:
    """The field of an option: its name, its type with what typer shows, its default."""
    shown = typer.Option(metavar=option.metavar, help=question.told(option), rich_help_panel=MEASURED)
    return option.name, Annotated[type(option.default), shown], option.default


if TYPE_CHECKING:
    QuestionOptions = Any
else:
    QuestionOptions = make_dataclass("QuestionOptions", starmap(_option_of, declared_options().values()), frozen=True)
    """The options of all questions. Each field is an option of `scan`."""
