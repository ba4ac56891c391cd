"""What claims are put to: a model that is measured, or a saved run that is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.claims.claim import NotTested
from sinkscope.claims.evidence import Evidence
from sinkscope.errors import SinkscopeError, in_one_line

if TYPE_CHECKING:
    from sinkscope.runs.run import Run
    from sinkscope.runs.saved.arms import Arms

Progress = Callable[[str, int, int], None]
ARMS = ("keys:first1", "value:first1")
FEWER = 4
"""Openings and losses take many passes: they read a quarter of the sequences."""


@dataclass
class Subject:
    """A model, or a saved run of one. What was measured once is kept, in memory and, with `folder`, on the disk.

    Attributes:
        label: its name in tables.
        model: a model's name, or a transformers model; None for a saved run.
        given: the saved run; None for a model.
        reading: how text is read: data, seq_len, num_sequences and seed, as `sinkscope.scan` takes them.
        loading: how the model is loaded: device, dtype and the like; `tokenizer` for a model object.
        folder: where runs are kept, and read again; None for nowhere.
    """

    label: str
    model: Any = None
    given: Run | None = None
    reading: dict[str, Any] = field(default_factory=dict)
    loading: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    progress: Progress | None = None
    _kept: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def sequences(self) -> int:
        """How many sequences a scan reads, where the model brings no task with a number of its own."""
        return int(self.reading.get("num_sequences") or 32)

    def scan(self, name: str, must: bool = False, **settings: Any) -> Run:
        """The run of a model under these settings, by its name. Raises NotTested where the model cannot be measured so;
        SinkscopeError for a scan that it must take, and where a kept run has other settings."""
        return self._once(name, lambda: self._scanned(name, must, {**self.reading, **settings}))

    def evidence(self, run: Run) -> Evidence:
        """A run as claims read it, made once."""
        return self._once(f"evidence {id(run)}", lambda: Evidence(run))

    def arms(self) -> Arms | Any:
        """What a model loses under ARMS: the table, with the number of sequences. Raises NotTested as `scan` does."""
        return self._once("arms", self._arms)

    def arms_settings(self) -> dict[str, Any]:
        """How ARMS are measured, as `sinkscope.arms` takes it."""
        reading = {name: value for name, value in self.reading.items() if value is not None}
        return {**reading, "num_sequences": max(2, self.sequences // FEWER), "draws": 2, **self.loading}

    def keeps(self, name: str) -> bool:
        """Whether `folder` holds this measurement from an earlier call: a scan by its name, or `arms`."""
        from sinkscope.runs.run import finished

        if self.folder is None:
            return False
        place = self.folder / name
        return (place / "arms.json").is_file() if name == "arms" else place.is_dir() and finished(place)

    def open(self) -> Any:
        """The model itself, loaded; a saved run's by its name. Raises NotTested where it is not there any more."""
        return self._once("model", self._opened)

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._kept:
            try:
                self._kept[name] = make()
            except NotTested as reason:
                self._kept[name] = reason
        kept = self._kept[name]
        if isinstance(kept, NotTested):
            raise kept
        return kept

    def _scanned(self, name: str, must: bool, settings: dict[str, Any]) -> Run:
        from sinkscope.engine.scan import scan
        from sinkscope.runs.run import load_run

        place = None if self.folder is None else self.folder / name
        if place is not None and self.keeps(name):
            return _same_settings(load_run(place), settings, self.loading)
        with nullcontext() if must else not_tested():
            run = scan(self.model, progress=self.progress, **settings, **self.loading)
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            run.save(place)
        return run

    def _arms(self) -> Any:
        from sinkscope.experiments.arms.experiment import arms
        from sinkscope.runs.saved.arms import load_arms

        if self.given is not None:
            raise NotTested("a run holds no losses: name its model")
        place = None if self.folder is None else self.folder / "arms"
        if place is not None and self.keeps("arms"):
            return load_arms(place)
        with not_tested():
            losses = arms(self.model, ARMS, progress=self.progress, **self.arms_settings())
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            losses.save(place)
        return losses

    def _opened(self) -> Any:
        from sinkscope.checkpoints import LoadOptions, open_checkpoint

        name = self.model if self.given is None else self.given.manifest.model.id
        if not isinstance(name, str):
            return name
        with not_tested():
            return open_checkpoint(name, LoadOptions(device="cpu")).model


@contextmanager
def not_tested() -> Iterator[None]:
    """An error of measuring becomes the reason why a claim is not tested."""
    try:
        yield
    except SinkscopeError as error:
        raise NotTested(in_one_line(error)) from None


def _same_settings(run: Run, settings: dict[str, Any], loading: dict[str, Any]) -> Run:
    """The run, where it was measured under these settings, in this dtype and of this revision.

    Raises SinkscopeError for other ones.
    """
    from sinkscope.runs.request import make_request

    renamed = {"measure": "measures"}
    wanted_settings = {renamed.get(name, name): _several(name, value) for name, value in settings.items()}
    request = make_request(model=run.manifest.request.model, **wanted_settings).part("text", "columns")
    kept = run.manifest.request.part("text", "columns")
    names = [name for name in request if request[name] != kept[name]]
    defaults = {"dtype": "auto", "revision": None}
    names += [
        name for name, value in defaults.items() if loading.get(name, value) != getattr(run.manifest.request, name)
    ]
    if names:
        raise SinkscopeError(f"{run.path} was measured with another {names[0]}: give another --out, or the same again")
    return run


def _several(name: str, value: Any) -> Any:
    """A setting of which a request holds several, as a tuple."""
    if name not in ("data", "first", "prepend") or value is None:
        return value
    return (value,) if isinstance(value, str | int) else tuple(value)
