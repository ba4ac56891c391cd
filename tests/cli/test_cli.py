"""The command line as a user sees it: stdout and stderr, exit codes, help, equal bytes; and run folders read back."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import typer
from conftest import SHORT, TABLES, Outcome, Scan, make_model, make_tokenizer
from small_run import make_run
from tiers import slow_but
from typer.testing import CliRunner, Result

from sinkscope import SinkscopeError, __version__, load_run, scan
from sinkscope.cli import app
from sinkscope.runs.schema.base import to_json

HEAVY = ("torch", "transformers", "pandas", "scipy", "rich.progress")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def strict_json(text: str) -> Any:
    """Python's parser takes NaN and Infinity; JSON has neither."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Import and help


PROBE = f"import sys; print(sorted(name for name in {HEAVY!r} if name in sys.modules))"


def test_importing_loads_nothing_heavy() -> None:
    assert python(f"import sinkscope, sinkscope.cli; {PROBE}") == "[]"


@pytest.mark.parametrize(
    "words", slow_but([["--help"], ["scan", "--help"], ["--version"], ["metrics", "-h"]], ["scan", "--help"])
)
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    code = f"import sys, sinkscope.cli\nsys.argv[1:] = {words!r}\ntry: sinkscope.cli.main()\nexcept SystemExit: {PROBE}"
    assert python(code).splitlines()[-1] == "[]"


FIRST_USES = (
    "from sinkscope import scan",
    "from sinkscope import Interrupted, scan",
    "import sinkscope; sinkscope.Interrupted; scan = sinkscope.scan",
    "import sinkscope.cli, sinkscope; from sinkscope import *",
)


@pytest.mark.slow
def test_public_scan_is_the_function_whatever_is_imported_first() -> None:
    """A submodule of that name would take its place. One process for all: the package is imported anew each time."""
    code = f"""
import sys
for use in {FIRST_USES!r}:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sinkscope"]:
        del sys.modules[name]
    names = {{}}
    exec(use, names)
    print(callable(names["scan"]))
"""
    assert python(code).split() == ["True"] * len(FIRST_USES)


def test_public_names_are_all_there() -> None:
    import sinkscope

    assert set(sinkscope.__all__) <= set(dir(sinkscope))
    for name in sinkscope.__all__:
        assert getattr(sinkscope, name) is not None
    with pytest.raises(AttributeError, match="nonesuch"):
        sinkscope.nonesuch  # noqa: B018


def commands(group: typer.Typer) -> list[tuple[str, ...]]:
    """The words of every command of a group, those of the groups inside it among them."""
    own = [(str(command.name),) for command in group.registered_commands]
    inside = [(inner.name, inner.typer_instance) for inner in group.registered_groups]
    return own + [(str(name), *words) for name, typed in inside if typed for words in commands(typed)]


COMMANDS = commands(app)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_an_example_and_refuses_unknown_options(words: tuple[str, ...]) -> None:
    shown = invoke(*words, "--help")
    assert shown.exit_code == 0
    assert f"Example: sinkscope {' '.join(words)}" in shown.stdout
    assert "\x1b" not in shown.stdout
    refused = invoke(*words, "--nonesuch")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "No such option: --nonesuch" in refused.stderr


def test_commands_of_groups_are_found() -> None:
    assert {("scan",), ("metrics",), ("trigger", "train")} <= set(COMMANDS)


def test_help_of_the_program() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(f"\n  {name} " in result.stdout for name in {words[0] for words in COMMANDS})
    assert invoke("--version").stdout.strip() == __version__
    assert invoke("nonesuch").exit_code == 2


def test_python_m_sinkscope() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sinkscope", "--version"], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    assert done.stdout.strip() == __version__


# metrics, examples


def test_metrics_lists_columns() -> None:
    result = invoke("metrics", "bos_mass")
    assert result.exit_code == 0
    assert "bos_mass" in result.stdout
    assert "sink_margin" not in result.stdout
    assert result.stderr == ""
    listed = json.loads(invoke("metrics", "--json").stdout)
    assert {"name", "table", "unit", "range", "formula", "source"} <= set(listed[0])


def test_metrics_covers_every_column_of_the_tables(default_run: Outcome) -> None:
    every = json.loads(invoke("metrics", "--json").stdout)
    listed = {(column["table"], column["name"]) for column in every if column["measure"] is None}
    keys = {"stream", "layer", "head", "kv_group", "module", "kind", "heads"}
    for table in ("heads", "layers"):
        columns = set(pd.read_csv(default_run.folder / f"{table}.csv", nrows=1).columns) - keys
        means = {name for name in columns if name.endswith("_sem") or name.startswith("mean_")}
        assert columns - means == {name for kind, name in listed if kind == table}


def test_metrics_lists_what_depends_on_position_and_length(default_run: Outcome) -> None:
    listed = json.loads(invoke("metrics", "--json").stdout)
    tables = {
        "positions": pd.read_parquet(default_run.folder / "positions.parquet"),
        "length_curve": pd.read_csv(default_run.folder / "length_curve.csv"),
    }
    for name, table in tables.items():
        keys = {"stream", "layer", "head", "position", "length", "token"}
        shown = {column for column in table.columns if not column.endswith("_sem")} - keys
        assert shown == {column["name"] for column in listed if column["table"] == name}
    assert {column["per"] for column in listed if column["table"] == "positions"} == {"position"}
    text = invoke("metrics", "alpha", "bos_mass").stdout
    assert "positions.parquet: one row per (stream, layer, head, position)" in text
    assert "alpha (position): probability" in text
    assert "bos_mass over the first `length` queries" in text


def test_metrics_says_what_the_smoothing_table_s_z_is() -> None:
    text = " ".join(invoke("metrics", "tr_bw").stdout.split())
    assert "In this table, z_i is the normalised token without the norm's gain" in text
    assert "Only the n = T - 1 tokens i, j >= 1 count" in text
    formulas = {column["name"]: column["formula"] for column in json.loads(invoke("metrics", "--json").stdout)}
    assert "without the norm's gain" in formulas["tr_bw"]
    assert "both >= 1" in formulas["avgcos_identity"]


def test_unknown_metric() -> None:
    result = invoke("metrics", "nonesuch")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


def test_examples_are_listed() -> None:
    result = invoke("examples")
    assert result.exit_code == 0
    assert "example:gemma-3-270m" in result.stdout
    assert "licence" in result.stdout


@pytest.mark.parametrize("name", ["trigger-relu", "example:trigger-relu"])
def test_the_folder_of_an_example_is_printed(name: str) -> None:
    result = invoke("examples", name)
    assert (result.exit_code, result.stderr) == (0, "")
    assert (Path(result.stdout.removesuffix("\n")) / "config.json").is_file()


def test_the_folder_of_an_unknown_example_is_refused() -> None:
    result = invoke("examples", "trigger-rely")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("sinkscope: error: unknown example 'trigger-rely': choose one of ")


# Broken pipes


def shell(command: str) -> subprocess.CompletedProcess[str]:
    program = f"{sys.executable} -m sinkscope"
    return subprocess.run(
        ["bash", "-c", command.replace("sinkscope", program)], capture_output=True, text=True, check=False,
        env=ENVIRONMENT,
    )  # fmt: skip


@pytest.mark.parametrize("command", slow_but(["metrics", "examples", "scan --help"], "scan --help"))
def test_closed_pipe_is_no_error(command: str) -> None:
    done = shell(f"set -o pipefail; sinkscope {command} | head -c 1 >/dev/null")
    assert done.stderr == ""
    assert done.returncode in (0, 141)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", slow_but(["examples", "--help", "scan --help", "--version"], "--version"))
def test_stdout_that_cannot_be_written(command: str) -> None:
    done = shell(f"sinkscope {command} > /dev/full")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


# scan


@pytest.fixture(scope="module")
def default_run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One scan of the tiny checkpoint, in process. Shared: leave its folder as it is."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    result = invoke("scan", tiny_folder, *SHORT, "--out", folder)
    assert result.exit_code == 0, result.stderr
    return Outcome(result.exit_code, result.stdout, result.stderr, folder)


def test_run_folder(default_run: Outcome) -> None:
    assert {path.name for path in default_run.folder.iterdir()} == {*TABLES, "summary.json", "manifest.json"}
    assert [path.name for path in default_run.folder.parent.iterdir()] == ["run"]
    for name in ("summary", "manifest"):
        text = (default_run.folder / f"{name}.json").read_text("utf-8")
        assert next(iter(strict_json(text))) == "schema_version"


def test_files_may_be_read_by_others(default_run: Outcome) -> None:
    mask = os.umask(0)
    os.umask(mask)
    assert default_run.folder.stat().st_mode & 0o777 == 0o777 & ~mask


def test_summary_is_on_stdout_and_nothing_on_stderr(default_run: Outcome) -> None:
    assert default_run.stderr == ""
    assert "BOS mass" in default_run.stdout
    assert str(default_run.folder.name) in default_run.stdout
    assert "\x1b" not in default_run.stdout
    assert max(map(len, default_run.stdout.splitlines())) <= 80


def test_warnings_are_on_stderr_only(tiny_folder: Path, scan_cli: Scan) -> None:
    outcome = scan_cli(tiny_folder, "--bos", "never")
    assert len(outcome.warnings) == 1
    assert outcome.warnings[0] not in outcome.stdout.replace("\n", " ")
    assert "sinkscope:" not in outcome.stdout


def test_json_is_the_summary_alone(tiny_folder: Path, scan_cli: Scan) -> None:
    outcome = scan_cli(tiny_folder, "--json")
    assert outcome.stdout == (outcome.folder / "summary.json").read_text("utf-8")
    assert json.loads(outcome.stdout)["complete"] is True


def test_quiet_prints_nothing(tiny_folder: Path, scan_cli: Scan) -> None:
    outcome = scan_cli(tiny_folder, "--bos", "never", "--quiet")
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "", "")
    both = scan_cli(tiny_folder, "--quiet", "--json", name="both")
    assert both.stdout == (both.folder / "summary.json").read_text("utf-8")


def test_default_folder_is_named_after_the_model(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("scan", tiny_folder, *SHORT, "--quiet").exit_code == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]


@pytest.mark.parametrize(
    ("model", "slug"),
    [("meta-llama/Llama-3-8B", "meta-llama--Llama-3-8B"), ("example:minilm", "example-minilm"), ("../..", "model")],
)
def test_slug(model: str, slug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sinkscope.cli.options import slug as slug_of

    monkeypatch.chdir(tmp_path)
    expected = tmp_path.parent.parent.name if model == "../.." else slug
    assert slug_of(model) == expected


@pytest.mark.slow
def test_same_command_gives_the_same_bytes(default_run: Outcome, tiny_folder: Path, tmp_path: Path) -> None:
    """Again, in a process of its own; the manifest alone may differ (times)."""
    command = [sys.executable, "-m", "sinkscope", "scan", str(tiny_folder), *SHORT, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert done.stderr == ""
    for name in (*TABLES, "summary.json"):
        assert (tmp_path / "run" / name).read_bytes() == (default_run.folder / name).read_bytes(), name
    folder = str(default_run.folder)
    assert done.stdout.split("written to")[0] == default_run.stdout.split("written to")[0]
    assert folder not in done.stdout
    recorded = json.loads((tmp_path / "run" / "manifest.json").read_text("utf-8"))["command"]
    assert recorded.startswith("sinkscope scan ")
    assert str(tmp_path / "run") in recorded


@pytest.mark.slow
def test_terminal_gets_colour_unless_no_color(tiny_folder: Path, tmp_path: Path) -> None:
    """Two scans in parallel, each with a terminal for its stdout."""
    import pty

    started = []
    for name, extra in (("colour", {}), ("plain", {"NO_COLOR": "1"})):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "sinkscope", "scan", str(tiny_folder), *SHORT, "--out", str(tmp_path / name)]
        process = subprocess.Popen(
            command, stdout=theirs, stderr=subprocess.DEVNULL, env={**ENVIRONMENT, "TERM": "xterm-256color", **extra}
        )
        os.close(theirs)
        started.append((process, ours))
    shown = []
    for process, ours in started:
        data = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux's way of saying that the terminal's other end is closed
                break
            if not part:
                break
            data += part
        os.close(ours)
        assert process.wait() == 0
        shown.append(data)
    assert b"\x1b[" in shown[0]
    assert b"\x1b" not in shown[1]
    assert b"BOS mass" in shown[1]


def test_parquet_tables_equal_the_csv(tiny_folder: Path, scan_cli: Scan) -> None:
    folder = scan_cli(tiny_folder, "--format", "parquet").folder
    for name in ("heads", "layers", "length_curve"):
        binary, text = pd.read_parquet(folder / f"{name}.parquet"), pd.read_csv(folder / f"{name}.csv")
        assert list(binary.columns) == list(text.columns)
        numbers = text.select_dtypes("number").columns
        left, right = (table[numbers].to_numpy(float, na_value=np.nan) for table in (binary, text))
        np.testing.assert_allclose(left, right, rtol=1e-8)


# Names from strangers


def test_model_name_with_escape_codes_and_markup(tiny_folder: Path, scan_cli: Scan, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "x[bold]y[bold]\x1b[31mz"))
    outcome = scan_cli(folder, out=tmp_path / "results\x1b[2J" / "run")
    assert outcome.code == 0
    assert "\x1b" not in outcome.stdout + outcome.stderr
    assert "x[bold]y[bold]\\x1b[31mz" in outcome.stdout.replace("\n", "")


def test_token_with_escape_codes_and_markup(tmp_path: Path, scan_cli: Scan) -> None:
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer(bos="\x1b[31m[red]<s>").save_pretrained(tmp_path / "model")
    outcome = scan_cli(tmp_path / "model")
    assert outcome.code == 0
    assert "\x1b" not in outcome.stdout + outcome.stderr
    assert "x1b[31m[red]<s>" in outcome.stdout
    assert outcome.json("summary")["first_token"]["text"] == "\x1b[31m[red]<s>"


@pytest.mark.parametrize("option", ["--data", "--device", "--bos", "--dormant-rule", "--batch-size"])
def test_escape_codes_in_options(option: str, tiny_folder: Path, scan_cli: Scan) -> None:
    outcome = scan_cli(tiny_folder, option, "\x1b[31m[bold]x\n")
    assert outcome.code == 2
    assert "\x1b" not in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_escape_codes_in_data_files(tiny_folder: Path, scan_cli: Scan, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"\x1b[31mbody": "words"}) + "\n", "utf-8")
    outcome = scan_cli(tiny_folder, "--data", path)
    assert outcome.code == 2
    assert "\x1b" not in outcome.stderr


# Runs read back


@pytest.mark.parametrize("data", ["prose", ["prose", "code"]], ids=["one", "two domains"])
def test_saved_run_reads_back(data: Any, tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    run = scan(tiny_model, tokenizer=tokenizer, data=data, seq_len=70, num_sequences=3, self_check=False)
    written = run.save(tmp_path / "run")
    own = {"domains.csv"} if isinstance(data, list) else set()
    assert {path.name for path in written} == {*TABLES, *own, "summary.json", "manifest.json"}
    assert run.path == tmp_path / "run"
    loaded = load_run(tmp_path / "run")
    assert loaded.path == run.path
    for name in ("heads", "layers", "length_curve"):
        left, right = getattr(loaded, name), getattr(run, name).reset_index(drop=True)
        pd.testing.assert_frame_equal(left, right, rtol=1e-8, atol=0, check_dtype=False)
    pd.testing.assert_frame_equal(loaded.positions, run.positions)
    pd.testing.assert_frame_equal(loaded.sequences, run.sequences)
    assert loaded.summary == run.summary
    assert loaded.manifest == run.manifest


def test_types_of_columns_survive(default_run: Outcome, tiny_folder: Path) -> None:
    """A column of exact zeros must not come back as integers."""
    from sinkscope import scan as measure

    run = measure(str(tiny_folder), seq_len=32, num_sequences=2)
    loaded = load_run(default_run.folder)
    for name in ("heads", "layers", "length_curve"):
        kinds = [{c: str(t) for c, t in getattr(one, name).dtypes.items()} for one in (run, loaded)]
        assert kinds[0] == kinds[1]


def test_saving_a_loaded_run_gives_the_same_bytes(default_run: Outcome, tmp_path: Path) -> None:
    load_run(default_run.folder).save(tmp_path / "run")
    for path in default_run.folder.iterdir():
        assert (tmp_path / "run" / path.name).read_bytes() == path.read_bytes(), path.name


def test_missing_values_are_null_and_empty(tiny_model: Any, tmp_path: Path) -> None:
    run = scan(tiny_model, data=[[3, 4, 5, 6]], self_check=False)
    assert run.heads["bos_mass_sem"].isna().all()
    run.save(tmp_path / "run")
    loaded = load_run(tmp_path / "run")
    assert loaded.heads["bos_mass_sem"].isna().all()
    assert loaded.summary.streams["text"].sink_rate_percent["0.3"].t64 is None
    assert strict_json(to_json(run.summary)) == loaded.summary.as_dict()
    assert run.summary == loaded.summary


def halved(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def without_last_rows(path: Path) -> None:
    path.write_text("".join(path.read_text("utf-8").splitlines(keepends=True)[:2]), "utf-8")


def without_rows(path: Path) -> None:
    path.write_text(path.read_text("utf-8").splitlines(keepends=True)[0], "utf-8")


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "removed": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "halved": halved,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


def damaged(default_run: Outcome, tmp_path: Path, name: str, damage: Callable[[Path], Any]) -> Path:
    folder = Path(shutil.copytree(default_run.folder, tmp_path / "damaged"))
    damage(folder / name)
    return folder


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", [*TABLES, "summary.json", "manifest.json"])
def test_damaged_run(name: str, how: str, default_run: Outcome, tmp_path: Path) -> None:
    with pytest.raises(SinkscopeError) as caught:
        load_run(damaged(default_run, tmp_path, name, DAMAGES[how]))
    assert "damaged" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [without_last_rows, without_rows])
@pytest.mark.parametrize("name", ["heads.csv", "layers.csv", "length_curve.csv"])
def test_table_cut_at_a_line(name: str, damage: Callable[[Path], Any], default_run: Outcome, tmp_path: Path) -> None:
    with pytest.raises(SinkscopeError):
        load_run(damaged(default_run, tmp_path, name, damage))


@pytest.mark.parametrize("text", ["[]", "{}", '{"name": "my app"}', '{"schema_version": 99}', "null"])
@pytest.mark.parametrize("name", ["manifest.json", "summary.json"])
def test_json_of_something_else(name: str, text: str, default_run: Outcome, tmp_path: Path) -> None:
    with pytest.raises(SinkscopeError):
        load_run(damaged(default_run, tmp_path, name, lambda path: path.write_text(text, "utf-8")))


def test_table_of_something_else(default_run: Outcome, tmp_path: Path) -> None:
    for name in ("heads.csv", "layers.csv", "length_curve.csv"):
        with pytest.raises(SinkscopeError):
            load_run(
                damaged(default_run, tmp_path / name, name, lambda path: path.write_text("name,age\na,1\n", "utf-8"))
            )


def test_a_run_folder_with_a_slip_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "gemma").mkdir()
    (tmp_path / "gemma" / "manifest.json").touch()
    near = re.escape(f"no such run folder: {tmp_path / 'gema'}; did you mean {tmp_path / 'gemma'}?")
    with pytest.raises(SinkscopeError, match=near):
        load_run(tmp_path / "gema")


def test_a_model_where_a_run_is_needed() -> None:
    with pytest.raises(
        SinkscopeError, match=r"that is a model, and `sinkscope scan example:minilm` writes its run folder"
    ):
        load_run("example:minilm")


@pytest.mark.parametrize(("name", "words"), [("absent", "no such run folder"), (".", "not a run folder")])
def test_folder_that_is_no_run(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SinkscopeError, match=words):
        load_run(tmp_path / name)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda run: load_run(None), "the path of a folder is needed, not NoneType"),
        (lambda run: run.save(3), "the path of a folder is needed, not int"),
        (lambda run: run.plot(3), "figure 3: choose one of heatmap, "),
        (lambda run: run.show(3), "3 is no column of heads"),
    ],
)
def test_what_names_nothing(work: Callable[[Any], object], words: str) -> None:
    with pytest.raises(SinkscopeError, match=words):
        work(make_run())


@pytest.mark.parametrize("command", [["compare", "{}", "{}"], ["baseline", "{}", "-o", "x.json"]])
def test_a_folder_that_holds_neither_a_run_nor_a_model(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inner = tmp_path / "runs" / "gemma"
    inner.mkdir(parents=True)
    (inner / "manifest.json").touch()
    told = CliRunner().invoke(app, [word.format("runs") for word in command])
    assert told.exit_code == 2
    assert told.stderr == (
        "sinkscope: error: runs is not a model folder (it holds no config.json), and runs is not a run folder: it "
        "holds the folders gemma: name one of them\n"
    )
    assert not (tmp_path / "x.json").exists()
