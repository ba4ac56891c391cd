"""`--dry-run` of `scan`, `arms`, `evict`, `quant` and `claims`: the option, and what it prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.cli.help import LOADED

if TYPE_CHECKING:
    from sinkscope.runs.forecast import Forecast

HELP = "Say what would be read, and the memory, passes and time; load and write nothing."
MACHINE = "With --dry-run: whose time is estimated: here (measured), h100 or a100. [default: here]"


@dataclass(frozen=True)
class DryRun:
    """Each field is an option."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help=HELP, rich_help_panel=LOADED)] = False
    machine: Annotated[str | None, typer.Option(metavar="NAME", help=MACHINE, rich_help_panel=LOADED)] = None

    def check(self) -> None:
        """Raises SinkscopeError for a machine that is named where nothing is estimated."""
        if self.machine is not None and not self.dry_run:
            from sinkscope.errors import SinkscopeError

            raise SinkscopeError("--machine goes with --dry-run")


NO_DRY_RUN = DryRun()


def print_forecasts(found: Sequence[Forecast], as_json: bool) -> None:
    """Prints the forecasts to stdout: as JSON one record, or a list of several."""
    if as_json:
        from sinkscope.runs.schema.base import to_json

        records = [each.as_dict() for each in found]
        sys.stdout.write(to_json(records[0] if len(records) == 1 else records))
        return
    from sinkscope.present.terminal.forecast import render_forecast

    sys.stdout.write("\n".join(render_forecast(each) for each in found))
