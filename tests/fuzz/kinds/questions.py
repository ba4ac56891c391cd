"""What a scan is asked beside its own columns: conversations, tokens around the text, tables of questions."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from contract import Case
from mutations import ODD_TEXTS, mutated_bytes, mutated_csv, mutated_frame, mutated_json, mutated_json_text
from world import CHATS, SHORT, lend

from kinds.declare import kind

TAGS = (
    "{{ bos_token }}", "{% for m in messages %}", "{% endfor %}", "{{ m['content'] }}", "{{ m.role }}", "{% if x %}",
    "{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{{ messages[9] }}", "{% generation %}", "{% endgeneration %}", "{{",
    "%}", "{{ m['content'] * 10000000 }}", "{{ ''.__class__ }}", "{# no", "{{ strftime_now('%Y') }}", "\x00", "é😀", "",
)  # fmt: skip


@kind(200)
def conversations(world: Path, folder: Path, draw: Random) -> Case:
    """Chats and chat templates, one of them damaged, with the regions of their speakers."""
    model = lend(world, "talker", folder, "model")
    rows = json.loads(json.dumps(CHATS))
    how = draw.choice(["row", "row", "text", "text", "bytes", "template", "template"])
    if how == "row":
        place = draw.randrange(len(rows))
        rows[place] = mutated_json(rows[place], draw, draw.choice([1, 2]))
    elif how == "text":
        message = draw.choice(draw.choice(rows)["messages"])
        message[draw.choice(["role", "content"])] = draw.choice(
            [*ODD_TEXTS, "user", "m", "assistant", "[user]", "</s>"]
        )
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "chats.jsonl").write_bytes(mutated_bytes(data, draw) if how == "bytes" else data)
    if how == "template":
        path = model / "chat_template.jinja"
        text = path.read_text("utf-8")
        place = draw.randrange(len(text))
        path.write_text(text[:place] + draw.choice(TAGS) + text[place + draw.choice([0, 0, 5, 30]) :], "utf-8")
    words = ["scan", "model", *SHORT, "--data", "chats.jsonl", "--measure", "regions", "--out", "run"]
    return Case(words + draw.choice([[], [], ["--generate", "3"]]), "run")


NUMBERS = ("0", "1", "2", "3", "15", "16", "17", "500", "511", "-1", "x", "")
FIRSTS = ("bos", "bosx2", "bosx0", "bosx99", "none", "random", "The", "a", "two words", "", "</s>", "é😀", "bosx", "7")


@kind(180)
def surrounded_texts(world: Path, folder: Path, draw: Random) -> Case:
    """Tokens before the text, other first tokens, and what the model writes after it."""
    words = ["scan", str(world / draw.choice(["tiny", "talker"])), *SHORT, "--out", "run"]
    words += ["--data", draw.choice(["random", "prose", str(world / "texts" / "ids.jsonl")])]
    for option, values in (("--first", FIRSTS), ("--prepend", NUMBERS), ("--generate", NUMBERS)):
        for _ in range(draw.choice([0, 0, 1, 1, 2])):
            words += [option, draw.choice(values)]
    words += draw.choice(
        [[], [], ["--measure", "first"], ["--measure", "all"], ["--bos", draw.choice(["never", "always"])]]
    )
    return Case(words, "run")


@kind(220)
def measured_tables(world: Path, folder: Path, draw: Random) -> Case:
    """One file of a run of every question, and the commands that read those."""
    import pandas as pd

    run = lend(world, "all", folder, "a")
    path = draw.choice(sorted(path for path in run.iterdir() if path.is_file()))
    if path.suffix == ".json":
        path.write_bytes(mutated_json_text(path.read_text("utf-8"), draw))
    elif path.suffix == ".csv":
        path.write_bytes(mutated_csv(path.read_text("utf-8"), draw))
    elif draw.random() < 0.3:
        path.write_bytes(mutated_bytes(path.read_bytes(), draw))
    else:
        mutated_frame(pd.read_parquet(path), draw).to_parquet(path, index=False)
    if draw.random() < 0.8:
        _with_sums_of_now(run)
    figures = ["smoothing", "switch", "alignment", "tokens", "spikes", "costs", "streaming", "cosine", "communication"]
    cases: list[tuple[list[str], str | None]] = [
        (["show", "a"], None), (["show", "a", "--json"], None),
        (["report", "a", "-o", "x.html"], "x.html"), (["card", "a"], None),
        (["export", "a", "--tokens", draw.choice(["sink", "massive"]), "--format", draw.choice(["ids", "csv"])], None),
        (["plot", "a", "--figure", draw.choice(figures), "-o", "x.svg"], "x.svg"),
        (["figures", "lampert", "a", "-o", "figures"], "figures"),
        (["atlas", "a", str(world / "b"), "-o", "x.html", "--csv", "x.csv"], "."),
        (["compare", "a", str(world / "all"), "--csv", "x.csv"], "x.csv"),
    ]  # fmt: skip
    words, target = draw.choice(cases)
    return Case(words, target)


def _with_sums_of_now(run: Path) -> None:
    """Writes the checksums of the files as they are, as who forges a run would: what is read is then the content."""
    import hashlib

    path = run / "manifest.json"
    try:
        manifest = json.loads(path.read_text("utf-8"))
        for name in manifest["files"]:
            manifest["files"][name] = hashlib.sha256((run / name).read_bytes()).hexdigest()
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        return
    path.write_text(json.dumps(manifest), "utf-8")
