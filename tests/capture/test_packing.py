"""What each pass leaves of a tensor comes back as it was: from few pieces of memory, or from a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sinkscope.capture import rows as storing
from sinkscope.capture import shelf as shelves
from sinkscope.capture.kept import Kept
from sinkscope.capture.rows import OPEN, SMALL, TOGETHER, Rows, Store
from sinkscope.capture.shelf import Shelf
from sinkscope.capture.taken import Taken, joined
from sinkscope.errors import SinkscopeError

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]


def filled(*passes: list[Tensor], store: Store | None = None) -> list[Rows]:
    """Rows of as many tensors, each list those of one pass; packed after each."""
    store = store or Store()
    rows = [store.rows() for _ in passes[0]]
    for tensors in passes:
        for own, tensor in zip(rows, tensors, strict=True):
            own.add(tensor)
        store.pack()
    return rows


def assert_holds(rows: Rows, tensors: list[Tensor]) -> None:
    pieces = rows.pieces
    assert pieces is not None
    assert len(pieces) == len(tensors)
    assert all(piece.dtype == tensor.dtype for piece, tensor in zip(pieces, tensors, strict=True))
    assert all(map(torch.equal, pieces, tensors))


def memory(rows: Rows) -> set[int]:
    return {piece.untyped_storage().data_ptr() for piece in rows.pieces or []}


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.randn(*shape) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_memory", [shelves.IN_MEMORY, 0], ids=["memory", "file"])
def test_tensors_come_back_as_they_were(dtype: torch.dtype, in_memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two shapes in turn, with large ones and a strided one between them, and some since the last time."""
    monkeypatch.setattr(shelves, "IN_MEMORY", in_memory)
    tensors = [random(dtype, 2, 1 + number % 2, 3) for number in range(2 * TOGETHER + 5)]
    tensors[3], tensors[9] = random(dtype, 2, SMALL, 3), random(dtype, 2, 3, 4).mT
    [rows] = filled(*[[tensor] for tensor in tensors])
    assert rows.shape == tensors[0].shape
    tensors.append(random(dtype, 2, 1, 3))
    rows.add(tensors[-1])
    assert_holds(rows, tensors)
    assert rows.passes == len(tensors)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("moved", [None, 0, 9], ids=["as they were", "after the prompt", "in the middle"])
def test_runs_of_passes_are_joined_as_their_pieces_are(moved: int | None, axis: int) -> None:
    """`moved`: the pass up to which other sequences are taken than the last pass had; of the last one, no token is."""
    passes = [random(torch.float32, 2, 4, 4, 3)] + [random(torch.float32, 2, 1, 1, 3) for _ in range(2 * TOGETHER)]
    taken = [Taken(None, None) for _ in passes]
    if moved is not None:
        taken[: moved + 1] = [Taken(torch.tensor([1, 1]), None)] * (moved + 1)
        taken[-1] = Taken(None, 0)
    wide = [passes[0][:, :1] if axis == 2 else passes[0][:, :, :1], *passes[1:]]
    (rows,) = filled(*[[tensor] for tensor in wide])
    stacks = rows.stacks
    assert stacks is not None
    assert len(stacks) < 5
    pieces = [part.of(tensor, axis) for tensor, part in zip(wide, taken, strict=True)]
    assert torch.equal(joined(stacks, taken, axis), torch.cat(pieces, axis))


def test_fewer_tensors_than_passes_are_not_joined() -> None:
    with pytest.raises(ValueError, match="2 passes are joined as if they were of 3"):
        joined([torch.zeros(2, 1, 1, 3)], [Taken(None, None)] * 3, 1)


def test_small_tensors_are_in_few_pieces_of_memory_and_large_ones_where_they_were() -> None:
    small, large = [torch.randn(2, 3) for _ in range(2 * TOGETHER)], torch.zeros(SMALL)
    assert len(memory(filled(*[[tensor] for tensor in small])[0])) == 3, "the first one, and two tables"
    assert memory(filled([large])[0]) == {large.untyped_storage().data_ptr()}


def test_two_views_of_the_same_numbers_are_copied_once() -> None:
    """An output projection reads the attention's output in another shape: (1, 1, H, d) here, whose strides may differ
    where there is one item."""
    output = torch.randn(1, 3, 1, 2).transpose(1, 2)
    read = output.reshape(1, 1, 6).view(1, 1, 3, 2)
    other = output.as_strided((1, 1, 3, 2), (1, 1, 1, 2))
    first, second, third = filled([output, read, other])
    places = [[piece.data_ptr() for piece in rows.pieces or ()] for rows in (first, second, third)]
    assert places[0] == places[1] != places[2]
    for rows, tensor in ((first, output), (second, read), (third, other)):
        assert_holds(rows, [tensor])


def test_two_views_that_show_opposite_numbers_are_two() -> None:
    numbers = torch.randn(3, dtype=torch.complex64)
    first, second = filled([numbers.imag, numbers.conj().imag])
    assert_holds(first, [numbers.imag])
    assert_holds(second, [-numbers.imag])


def test_tensors_of_inference_mode_are_copied_out_of_it() -> None:
    with torch.inference_mode():
        tensor = torch.randn(2, 3).mT
        [rows] = filled([tensor])
    assert_holds(rows, [tensor])
    assert not (rows.pieces or [tensor])[0].is_inference()
    Store().pack()


def test_tensors_of_another_class_stay_where_they_are() -> None:
    own = torch.randn(3).as_subclass(type("Own", (Tensor,), {}))
    [rows] = filled([own])
    assert memory(rows) == {own.untyped_storage().data_ptr()}


@pytest.mark.parametrize("how", ["missing", "written", "written and packed"])
def test_nothing_is_told_where_one_is_missing_or_was_written_into(how: str) -> None:
    store, tensor = Store(), torch.randn(3)
    rows = store.rows()
    rows.add(torch.randn(3))
    store.pack()
    rows.add(None if how == "missing" else Kept.of(tensor))
    tensor.add_(1)
    if how == "written and packed":
        store.pack()
    rows.add(torch.randn(3))
    assert rows.pieces is None
    assert rows.passes == 3


def test_what_was_written_into_after_it_was_packed_is_as_it_was() -> None:
    tensor = torch.randn(3)
    before, store = tensor.clone(), Store()
    rows = store.rows()
    rows.add(Kept.of(tensor))
    store.pack()
    tensor.add_(1)
    assert_holds(rows, [before])


def test_those_of_an_accelerator_are_copied_together_and_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without numbers stand for them here: they are on no CPU either."""
    monkeypatch.setattr(shelves, "IN_MEMORY", 0)
    tensors = [torch.empty(2, 3, device="meta") for _ in range(2 * TOGETHER + 1)]
    [rows] = filled(*[[tensor] for tensor in tensors])
    pieces = rows.pieces or []
    assert [piece.shape for piece in pieces] == [(2, 3)] * len(tensors)
    assert {piece.device.type for piece in pieces} == {"meta"}
    assert [len({id(piece._base) for piece in pieces[part]}) for part in (slice(1), slice(1, 1 + TOGETHER))] == [1, 1]


@pytest.mark.parametrize("in_memory", [shelves.IN_MEMORY, 0], ids=["memory", "file"])
def test_every_tensor_of_a_pass_comes_back_whatever_else_the_pass_has(
    in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of three kinds in turn, of several dtypes: one has a large tensor in place of a small one, one shows the
    same memory twice. In the middle, one kind of rows is let go."""
    monkeypatch.setattr(shelves, "IN_MEMORY", in_memory)
    store, held = Store(), list[list[Tensor]]()
    rows = [store.rows() for _ in range(5)]
    for number in range(3 * TOGETHER):
        output = torch.randn(1, 2, 6)
        tensors = [output, output.view(1, 2, 2, 3), torch.randn(1, 4).bfloat16(), torch.tensor(number), torch.randn(7)]
        if number % 7 == 3:
            tensors[4] = torch.randn(SMALL)
        if number % 5 == 2:
            tensors[1] = torch.randn(1, 2, 2, 3)
        for own, tensor in zip(rows, tensors, strict=True):
            own.add(tensor)
        if number == TOGETHER:
            rows[0].let_go()
        store.pack()
        held.append(tensors)
    for place in range(1, 5):
        assert_holds(rows[place], [tensors[place] for tensors in held])
    assert rows[0].pieces is None


def test_a_table_takes_no_more_memory_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "ROOM", 5 * 24)
    tensors = [torch.randn(2, 3) for _ in range(11)]
    [rows] = filled(*[[tensor] for tensor in tensors])
    assert len(memory(rows)) == 3, "the first one, and two tables of five"
    assert_holds(rows, tensors)


def test_the_file_has_no_name_and_the_first_tensors_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shelves, "IN_MEMORY", 40)
    shelf = Shelf()
    first, second = torch.randn(8), torch.randn(8)
    assert shelf.put(first) is first
    shelved = shelf.put(second)
    assert isinstance(shelved, shelves.InFile)
    assert torch.equal(shelved.tensor(0, 8), second)
    assert not [*tmp_path.iterdir()]


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "break_it",
    [
        lambda patch: patch.setattr(tempfile, "TemporaryFile", full),
        lambda patch: patch.setattr(shelves, "LEFT_FREE", 2**70),
        lambda patch: patch.setattr(shelves, "_bytes", full),
    ],
    ids=["no file", "little room", "a write that fails"],
)
def test_all_stays_in_memory_where_the_disk_is_full(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelves, "IN_MEMORY", 0)
    break_it(monkeypatch)
    shelf, tensors = Shelf(), [torch.randn(3) for _ in range(2)]
    assert [shelf.put(tensor) is tensor for tensor in tensors] == [True, True]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process is forked here")
def test_a_forked_process_reads_the_file_and_writes_nothing_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "IN_MEMORY", 0)
    shelf, first, second = Shelf(), torch.randn(8), torch.randn(8)
    written = shelf.put(first)
    assert isinstance(written, shelves.InFile)
    child = os.fork()
    if not child:
        code = 1
        with suppress(BaseException):
            code = 0 if torch.equal(written.tensor(0, 8), first) and shelf.put(second) is second else 1
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    later = shelf.put(second)
    assert isinstance(later, shelves.InFile)
    assert torch.equal(later.tensor(0, 8), second)
    assert torch.equal(written.tensor(0, 8), first)


def test_a_large_tensor_that_was_written_into_is_not_told() -> None:
    """It stays where it is, so that what is written into it later shows."""
    kept, plain = torch.zeros(SMALL), torch.zeros(SMALL)
    store = Store()
    rows = [store.rows(), store.rows()]
    rows[0].add(Kept.of(kept))
    rows[1].add(plain)
    store.pack()
    assert_holds(rows[0], [kept])
    assert_holds(rows[1], [plain])
    kept.add_(1)
    plain.add_(1)
    assert [own.pieces for own in rows] == [None, None]


def test_only_what_is_asked_for_is_read_from_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of two shapes in turn, so that each is a run of its own."""
    monkeypatch.setattr(shelves, "IN_MEMORY", 0)
    tensors = [torch.randn(1 + number % 2, 3) for number in range(6 * TOGETHER)]
    [rows] = filled(*[[tensor] for tensor in tensors])
    read = []
    plain = shelves.InFile.tensor
    monkeypatch.setattr(shelves.InFile, "tensor", lambda own, *ends: read.append(ends) or plain(own, *ends))
    assert_holds(rows, tensors)
    assert sum(stop - start for start, stop in read) <= len(tensors)


def test_few_tables_are_filled_at_a_time() -> None:
    tensors = [torch.randn(1 + number % 9, 3) for number in range(200)]
    store = Store()
    [rows] = filled(*[[tensor] for tensor in tensors], store=store)
    assert len(store._tables) == OPEN
    assert_holds(rows, tensors)


def test_a_file_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "IN_MEMORY", 0)
    shelved = Shelf().put(torch.randn(8))
    assert isinstance(shelved, shelves.InFile)
    monkeypatch.setattr(shelved.file, "read", lambda *_: full())
    with pytest.raises(SinkscopeError, match="the temporary file of a watched sequence cannot be read"):
        shelved.tensor(0, 8)
