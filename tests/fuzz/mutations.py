"""Small damage to texts, bytes, JSON, numbers and tables, drawn from a seeded generator."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

ODD_TEXTS = (
    "", " ", "\0", "\x1b[31mred", "a\nb", "::error::x", "=1+1", "../up", "/", "~nobody/x", "\ud800", "é😀", "%s{}$",
    "x" * 5000, "nan", "-1", "<script>", "con\u2028x", "'; --", "None",
)  # fmt: skip
ODD_NUMBERS = (0, 1, -1, 2, 7, 0.5, -0.5, 2**31, 2**63, -(2**63), 10**12, 10**26, 1e308, float("nan"), float("inf"))
ODD_VALUES: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"a": {"b": []}}, [None], ["x", 1], *ODD_NUMBERS)
PUNCTUATION = b'{}[]",:0-9ex\n\\\xff\x00\xef\xbb\xbf'


def odd_value(draw: Random) -> Any:
    """Any JSON value that a field may wrongly hold."""
    return draw.choice(ODD_VALUES) if draw.random() < 0.7 else printable_odd(draw)


def printable_odd(draw: Random) -> str:
    """An odd text that UTF-8 can write."""
    return draw.choice([text for text in ODD_TEXTS if "\ud800" not in text])


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside JSON data, the lists' first three entries only."""
    keys: list[Any] = []
    if isinstance(data, dict):
        keys = list(data)
    elif isinstance(data, list):
        keys = list(range(min(3, len(data))))
    return [each for key in keys for each in [(*path, key), *places(data[key], (*path, key))]]


def mutated_json(data: Any, draw: Random, times: int = 1) -> Any:
    """JSON data with fields deleted, renamed, retyped, scaled or nested. A shallow field is as likely as a deep one."""
    data = copy.deepcopy(data)
    for _ in range(times):
        every = places(data)
        if not every:
            return odd_value(draw)
        depth = draw.choice(sorted({len(path) for path in every}))
        path = draw.choice([path for path in every if len(path) == depth])
        parent = data
        for key in path[:-1]:
            parent = parent[key]
        _change(parent, path[-1], draw)
    return data


def _change(parent: Any, key: Any, draw: Random) -> None:
    value = parent[key]
    how = draw.choice(["delete", "odd", "odd", "text", "wrap", "again", "scale"])
    if how == "delete":
        del parent[key]
    elif how == "text":
        parent[key] = str(value) if draw.random() < 0.5 else printable_odd(draw)
    elif how == "wrap":
        parent[key] = draw.choice([[value], {"x": value}, [value, value]])
    elif how == "again" and isinstance(parent, list):
        parent.append(value)
    elif how == "scale" and isinstance(value, int | float) and not isinstance(value, bool):
        parent[key] = draw.choice([-value, value + 1, value * 1000, value / 3, value - 1])
    else:
        parent[key] = odd_value(draw)


def mutated_json_text(text: str, draw: Random) -> bytes:
    """A JSON file's bytes with its data mutated; one in five times its bytes, one in twenty times very deep."""
    luck = draw.random()
    if luck < 0.05:
        return b"[" * 100_000 if draw.random() < 0.5 else b'{"a":' * 100_000
    if luck < 0.2:
        return mutated_bytes(text.encode(), draw)
    return json.dumps(mutated_json(json.loads(text), draw, draw.choice([1, 1, 1, 2, 4]))).encode()


def mutated_bytes(data: bytes, draw: Random, head: int | None = None) -> bytes:
    """Bytes cut, doubled, zeroed, overwritten or flipped; within the first `head` bytes where that is given."""
    how = draw.choice(["cut", "cut", "flip", "flip", "flip", "zero", "insert", "remove", "empty", "huge"])
    end = max(1, min(len(data), head or len(data)))
    place = draw.randrange(end)
    some = draw.randrange(1, 65)
    changes = {
        "cut": data[:place], "zero": data[:place] + bytes(some) + data[place + some :],
        "insert": data[:place] + bytes(draw.choice(PUNCTUATION) for _ in range(some)) + data[place:],
        "remove": data[:place] + data[place + some :], "empty": b"",
        "huge": data[:place] + b"\xff" * draw.choice([1, 4, 8]) + data[place + 8 :],
    }  # fmt: skip
    if how != "flip":
        return changes[how]
    flipped = bytearray(data)
    for _ in range(draw.choice([1, 1, 3, 20])):
        if flipped:
            flipped[draw.randrange(end)] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def mutated_csv(text: str, draw: Random) -> bytes:
    """A table's text with one cell, row or column changed; sometimes its bytes."""
    if draw.random() < 0.2:
        return mutated_bytes(text.encode(), draw)
    rows = [line.split(",") for line in text.splitlines()]
    row, column = draw.randrange(len(rows)), draw.randrange(len(rows[0]))
    how = draw.choice(["cell", "cell", "cell", "row", "twice", "column", "name"])
    if how == "cell" or (how == "name" and row == 0):
        rows[row][min(column, len(rows[row]) - 1)] = odd_cell(draw)
    elif how == "row":
        del rows[row]
    elif how == "twice":
        rows.insert(row, rows[row])
    elif how == "column":
        for each in rows:
            del each[min(column, len(each) - 1)]
    else:
        rows[0][column] = draw.choice(["x", "", rows[0][0], rows[0][-1]])
    return ("\n".join(",".join(each) for each in rows) + "\n").encode()


def odd_cell(draw: Random) -> str:
    """A cell's text that a number or name may wrongly be."""
    return draw.choice(["", "nan", "inf", "-inf", "-1", "1e400", "x", "True", '"', "999999999999", "0x1", "1.5", "é"])


def mutated_frame(table: Any, draw: Random) -> Any:
    """A pandas table with one cell, column or row changed."""
    table = table.copy()
    name = draw.choice(list(table.columns))
    how = draw.choice(["cell", "cell", "text", "drop", "rows", "double", "sort", "type"])
    if how == "cell":
        table[name] = table[name].astype(object)
        words = table[name].map(type).eq(str).any()  # a file has no column of words and numbers
        values = [None, "", "x", "nan"] if words else [None, -1, 10**15, float("nan"), float("inf"), 0.5]
        table.loc[draw.randrange(len(table)), name] = draw.choice(values)
        table[name] = table[name].infer_objects()
    elif how == "text":
        table[name] = draw.choice(["", "x", "nan"])
    elif how == "drop":
        table = table.drop(columns=name)
    elif how == "rows":
        table = table.iloc[: draw.randrange(len(table))]
    elif how == "double":
        table = table.iloc[[*range(len(table)), draw.randrange(len(table))]]
    elif how == "sort":
        table = table.sample(frac=1, random_state=draw.randrange(1000))
    else:
        table[name] = table[name].astype(str)
    return table.reset_index(drop=True)
