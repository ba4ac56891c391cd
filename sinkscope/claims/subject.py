"""What claims are put to: a model that is measured, or a saved run that is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sinkscope.claims.claim import NotTested
from sinkscope.claims.evidence import Evidence
from sinkscope.errors import SinkscopeError, in_one_line

if TYPE_CHECKING:
    from sinkscope.checkpoints import Checkpoint, LoadOptions
    from sinkscope.runs.run import Run
    from sinkscope.runs.saved.arms import Arms, SavedArms
    from sinkscope.runs.schema.manifest import Manifest

Progress = Callable[[str, int, int], None]
ARMS = ("keys:first1", "value:first1")
FEWER = 4
"""Openings and losses take many passes: they read a quarter of the sequences."""
OPENED = "the open model"
RENAMED = {"measure": "measures"}
"""Keywords of `sinkscope.scan` that a request calls otherwise."""

T = TypeVar("T")


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
        force: measure anew where what is kept is of other weights, text or settings, which is an error otherwise.
    """

    label: str
    model: Any = None
    given: Run | None = None
    reading: dict[str, Any] = field(default_factory=dict)
    loading: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    force: bool = False
    progress: Progress | None = None
    _kept: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def sequences(self) -> int:
        """How many sequences a scan reads, where the model brings no task with a number of its own."""
        return int(self.reading.get("num_sequences") or 32)

    def scan(self, name: str, must: bool = False, **settings: Any) -> Run:
        """The run of a model under these settings, by its name. Raises NotTested where the model cannot be measured so;
        SinkscopeError for a scan that it must take, and where a kept run is of other weights, text or settings."""
        return self._once(name, lambda: self._scanned(name, must, {**self.reading, **settings}))

    def evidence(self, run: Run) -> Evidence:
        """A run as claims read it, made once."""
        return self._once(f"evidence {id(run)}", lambda: Evidence(run))

    def arms(self) -> Arms | Any:
        """What a model loses under ARMS: the table, with the number of sequences. Raises as `scan` does."""
        return self._once("arms", self._arms)

    def arms_settings(self) -> dict[str, Any]:
        """How ARMS are measured, as `sinkscope.arms` takes it."""
        reading = {name: value for name, value in self.reading.items() if value is not None}
        return {**reading, "num_sequences": max(2, self.sequences // FEWER), "draws": 2, **self.loading}

    def keeps(self, name: str) -> bool:
        """Whether `folder` holds this measurement from an earlier call, by its name alone: a scan's, or `arms`."""
        from sinkscope.runs.run import finished

        if self.folder is None:
            return False
        place = self.folder / name
        return (place / "arms.json").is_file() if name == "arms" else place.is_dir() and finished(place)

    def open(self) -> Any:
        """The model itself, loaded; a saved run's by its name. Raises NotTested where it is not there any more, or
        holds other weights."""
        return self._once("model", self._opened)

    def close(self) -> None:
        """Lets go of the model that was opened to tell whether what is kept is of it."""
        self._kept.pop(OPENED, None)

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

        place = None if self.folder is None else self.folder / name
        if place is not None and self.keeps(name):
            from sinkscope.engine.finished import finished_before

            with nullcontext() if must else not_tested():
                wanted = self._wanted(settings)
            kept = self._unless_forced(lambda: finished_before(place, wanted))
            if kept is not None:
                return kept
        self.close()  # the scan loads a model of its own, and memory may not hold both
        with nullcontext() if must else not_tested():
            run = scan(self.model, progress=self.progress, **settings, **self.loading)
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            run.save(place, force=self.force)
        return run

    def _wanted(self, settings: dict[str, Any]) -> Manifest:
        """What the manifest of a scan under these settings would be now."""
        from sinkscope.engine.finished import wanted_manifest
        from sinkscope.engine.requested import requested

        loading = {name: value for name, value in self.loading.items() if name != "tokenizer"}
        named = {RENAMED.get(name, name): value for name, value in (settings | loading).items()}
        request = requested(self.model, named.pop("data", None), named)
        return wanted_manifest(request, self._checkpoint())

    def _checkpoint(self) -> Checkpoint:
        """The model as scans load it, opened once for all that is kept."""
        from sinkscope.engine.loaded import loaded

        report = self.progress or (lambda *_: None)
        return self._once(OPENED, lambda: loaded(self.model, self.loading.get("tokenizer"), self._options(), report))

    def _options(self) -> LoadOptions:
        """How scans load the model."""
        from sinkscope.checkpoints import LoadOptions

        names = {field.name for field in fields(LoadOptions)}
        return LoadOptions(**{name: value for name, value in self.loading.items() if name in names})

    def _unless_forced(self, read: Callable[[], T]) -> T | None:
        """What is kept. With `force`, None where that is of another measurement, or damaged."""
        try:
            return read()
        except SinkscopeError:
            if not self.force:
                raise
            return None

    def _arms(self) -> Any:
        from sinkscope.experiments.arms.experiment import arms

        if self.given is not None:
            raise NotTested("a run holds no losses: name its model")
        place = None if self.folder is None else self.folder / "arms"
        if place is not None and self.keeps("arms"):
            kept = self._unless_forced(lambda: self._arms_before(place))
            if kept is not None:
                return kept
        self.close()
        with not_tested():
            losses = arms(self.model, ARMS, progress=self.progress, **self.arms_settings())
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            losses.save(place, force=self.force)
        return losses

    def _arms_before(self, place: Path) -> SavedArms:
        from sinkscope.experiments.arms.before import arms_before

        names = ("data", "seq_len", "num_sequences", "draws", "seed")
        settings = {name: value for name, value in self.arms_settings().items() if name in names}
        return arms_before(place, ARMS, self._checkpoint(), **settings)

    def _opened(self) -> Any:
        from sinkscope.checkpoints import open_checkpoint

        if self.given is None:
            if not isinstance(self.model, str):
                return self.model
            with not_tested():
                return open_checkpoint(self.model, replace(self._options(), device="cpu")).model
        told = self.given.manifest.model
        with not_tested():
            checkpoint = open_checkpoint(told.id, replace(self._options(), device="cpu", revision=told.revision))
        if checkpoint.facts["weights_sha256"] != told.weights_sha256:
            raise NotTested(f"{told.id} holds other weights than the run was made of: scan it again")
        return checkpoint.model


@contextmanager
def not_tested() -> Iterator[None]:
    """An error of measuring becomes the reason why a claim is not tested."""
    try:
        yield
    except SinkscopeError as error:
        raise NotTested(in_one_line(error)) from None
