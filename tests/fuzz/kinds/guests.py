"""What others bring: adapters, metrics, packages with entry points, and models of a hub."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from contract import Case
from hub import Answer, Files, Hub, files_of, found
from mutations import mutated_bytes, mutated_json_text
from world import SHORT, lend

from kinds.declare import kind


@kind(200)
def adapters(world: Path, folder: Path, draw: Random) -> Case:
    adapter = lend(world, "adapter", folder, "adapter")
    settings, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    how = draw.choice(["settings", "settings", "settings", "header", "bytes", "remove"])
    if how == "settings":
        settings.write_bytes(mutated_json_text(settings.read_text("utf-8"), draw))
    elif how == "header":
        data = weights.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = mutated_json_text(data[8 : 8 + size].decode(), draw)
        weights.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    elif how == "bytes":
        weights.write_bytes(mutated_bytes(weights.read_bytes(), draw, draw.choice([8, 300, None])))
    else:
        draw.choice([settings, weights]).unlink()
    model = draw.choice(["tiny", "tiny", "tiny", "split"])
    return Case(["scan", str(world / model), *SHORT, "--data", "random", "--adapter", "adapter", "--out", "run"], "run")


HEAD = """import sys, torch
from sinkscope import LayerView, Missing, head_metric, layer_metric


"""
DECORATORS = (
    '@head_metric(unit="share", range="[0, 1]")', '@layer_metric(unit="share", range="[0, 1]")', "@head_metric",
    '@head_metric(unit="share", range="[0, 1]", dormant="low")', '@head_metric(unit=3, range=None)', "",
    "@head_metric()",
    '@head_metric(unit="share", range="x" * 5000)', '@head_metric(unit="::error::", range="<b>", source="é")',
)  # fmt: skip
NAMES = ("own", "bos_mass", "head", "x" * 80, "é", "_own", "layer", "OWN", "own", "own", "own")
BODIES = (
    "return view.attention.first.mean(-1)", "return view.attention.first", "return None", "return 1.0", "raise Missing",
    "raise KeyError('x')", "raise ValueError()", "raise SystemExit(0)", "sys.exit(3)", "sys.exit('no')",
    "raise KeyboardInterrupt", "raise GeneratorExit", "raise StopIteration", "raise AssertionError('a\\nb')",
    "raise RecursionError", "return own(view)", "return view.nonesuch",
    "view.attention.first.zero_(); return view.x_norms",
    "print('a guest says'); return view.attention.first.mean(-1)",
    "sys.stdout.close(); return view.attention.first.mean(-1)",
    "sys.stdout.write('a guest says ' * 10000); return view.attention.first.mean(-1)",
    "return view.attention.first.mean(-1) * float('nan')", "return view.attention.first.mean(-1).to(torch.complex64)",
    "return view.attention.first.mean(-1).to_sparse()", "return view.attention.first.mean(-1).to('meta')",
    "return view.attention.first.mean(-1) > 0", "return view.attention.first.mean(-1).long()",
    "return torch.quantize_per_tensor(view.attention.first.mean(-1).float(), 0.1, 0, torch.quint8)",
    "view.attention = 3; return 1", "view.x_norms = 3; return 1",
    "torch.set_grad_enabled(True); return view.x_norms[:, 0]",
    "return view.x_norms[:, 0]", "return view.attention.first.mean(-1).numpy()",
    "return view.attention.first.mean(-1).half()",
    "return view.attention.first.mean(-1).requires_grad_()", "raise type('Own', (Exception,), {})('x' * 3000)",
    "sys.stderr.write('a guest says\\n'); return view.attention.first.mean(-1)", "del view.attention; return 1",
)  # fmt: skip
BEGINNINGS = (
    "",
    "",
    "",
    "",
    "",
    "raise SystemExit(0)\n",
    "1 / 0\n",
    "import nonesuch\n",
    "print('a guest says')\n",
    "def (\n",
)


@kind(160)
def metrics(world: Path, folder: Path, draw: Random) -> Case:
    """A file of a metric that fails, or does what a metric should not."""
    name, text = draw.choice(NAMES), ""
    for _ in range(draw.choice([1, 1, 1, 2])):
        doc = draw.choice(['    """What it is."""\n', '    """What it is."""\n', "", '    """ """\n'])
        text += f"{draw.choice(DECORATORS)}\ndef {name}(view: LayerView):\n{doc}    {draw.choice(BODIES)}\n\n\n"
    path = folder / "own_metric.py"
    path.write_text(draw.choice(BEGINNINGS) + HEAD + text, "utf-8")
    if draw.random() < 0.1:
        path.write_bytes(mutated_bytes(path.read_bytes(), draw))
    words = ["scan", str(world / "tiny"), *SHORT, "--data", "random", "--metrics", "own_metric.py", "--out", "run"]
    return Case(words + draw.choice([[], [], ["--strict"], ["--json"]]), "run")


GROUPS = (
    "questions", "arms", "metrics", "export_formats", "attention_keywords", "attention_scores", "claims", "input_kinds",
    "nonesuch",
)  # fmt: skip
OBJECTS = ("THING", "NONE", "fails", "missing", "Own", "nowhere.at:all", "THING.name", "")
PACKAGE = """
NONE = None


class Own:
    name = "own"


THING = Own()


def fails(*_, **__):
    raise KeyError("x")
"""
ANY = (
    ("metrics",), ("metrics", "--json"), ("schema",), ("schema", "request"), ("scan", "--help"), ("arms", "--help"),
    ("plot", "--help"), ("claims", "--list"), ("claims", "own"), ("claims", "{a}", "--claim", "own", "--quiet"),
    ("export", "{a}", "--format", "own"), ("show", "{a}"), ("report", "{a}", "-o", "x.html"),
    ("scan", "{tiny}", *SHORT, "--data", "random", "--measure", "own", "--out", "run"),
    ("scan", "{tiny}", *SHORT, "--data", "random", "--out", "run"),
    ("arms", "{tiny}", "--arm", "own:1", "--seq-len", "16", "--num-sequences", "2", "--quiet", "--out", "run"),
)  # fmt: skip


@kind(100)
def packages(world: Path, folder: Path, draw: Random) -> Case:
    """A package beside sinkscope whose entry points lead nowhere, to what fails, or to what is no such thing."""
    module = f"guest_{draw.randrange(10**9)}"
    site, begins = (
        folder / "site",
        draw.choice(["", "", "", "raise SystemExit(0)\n", "1 / 0\n", "print('a guest says')\n", "def ("]),
    )
    facts = site / f"{module}-1.0.dist-info"
    facts.mkdir(parents=True)
    (site / f"{module}.py").write_text(begins + PACKAGE, "utf-8")
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", "utf-8")
    name = draw.choice(["own", "own", "own", "bos_mass", "spikes", "csv", "heads", "a b", "::error::x", "é"])
    entries = "".join(
        f"[sinkscope.{group}]\n{name} = {module}:{draw.choice(OBJECTS)}\n\n"
        for group in draw.sample(GROUPS, draw.choice([1, 1, 2]))
    )
    (facts / "entry_points.txt").write_text(entries, "utf-8")
    words = [word.format(a=world / "a", tiny=world / "tiny") for word in draw.choice(ANY)]
    target = next((words[place + 1] for place, word in enumerate(words) if word in ("--out", "-o")), None)
    return Case(words, target, around=lambda: on_the_path(site))


@contextmanager
def on_the_path(site: Path) -> Iterator[None]:
    compiles = sys.dont_write_bytecode
    sys.path.insert(0, str(site))
    sys.dont_write_bytecode = True  # the folder stays as it was
    try:
        yield
    finally:
        sys.path.remove(str(site))
        sys.dont_write_bytecode = compiles


HUB_NAME = "some/model"


@kind(90)
def hubs(world: Path, folder: Path, draw: Random) -> Case:
    """A model of a hub whose files or answers are damaged. Half of the time the model was opened once before, and the
    hub is gone by now: the cache holds all of it, a part, or nothing."""
    files = files_of(world / draw.choice(["tiny", "split"]))
    if draw.random() < 0.4:
        name = draw.choice(sorted(files))
        files[name] = mutated_bytes(files[name], draw, draw.choice([100, None]))
    seed = draw.random()
    words = ["scan", HUB_NAME, *SHORT, "--data", "random", "--out", "run"]
    words += draw.choice([[], [], [], ["--revision", draw.choice(["main", "v1", "x", "0123456", "../x", "é", ""])]])
    return Case(words, "run", {"HF_HUB_DOWNLOAD_TIMEOUT": "1"}, around=lambda: misbehaving(folder, files, seed))


@contextmanager
def misbehaving(folder: Path, files: Files, seed: float) -> Iterator[Hub]:
    """A hub that answers one request in five in a way of its own, the same ways for the same seed. It may be gone after
    a first download."""
    import tempfile

    from sinkscope.checkpoints import LoadOptions, open_checkpoint
    from sinkscope.errors import SinkscopeError

    draw = Random(seed)
    gone = draw.random() < 0.5

    def trick(request: Answer) -> bool:
        if draw.random() > 0.2:
            return False
        status = draw.choice([200, 200, 401, 403, 404, 429, 500, 503])
        if status != 200:
            request.refuse(status, draw.choice(["", "RepoNotFound", "GatedRepo", "EntryNotFound", "\x1b[31mno"]))
        else:
            odd: list[dict[str, Any]] = [
                {"data": b""}, {"data": b"{"}, {"data": b"null"}, {"data": b"[]"}, {"data": b"<html>" * 100},
                {"data": b"x" * 1000, "cut": 10}, {"data": b"x", "headers": {"X-Repo-Commit": "../../x"}},
                {"data": b"x", "headers": {"ETag": '"../x"'}}, {"data": b"{}", "headers": {"Content-Encoding": "gzip"}},
                {"data": b"", "status": 302, "headers": {"Location": "file:///etc/passwd"}},
            ]  # fmt: skip
            request.answer(**draw.choice(odd))
        return True

    with tempfile.TemporaryDirectory() as cache, found(Path(cache)) as hub:
        hub.add(HUB_NAME, files, "main", "v1")
        hub.tricks.append(trick)
        if gone:
            with suppress(SinkscopeError):
                open_checkpoint(HUB_NAME, LoadOptions(device="cpu"))
            hub.stop()
        yield hub
