"""Compiles the Triton kernels ahead of time, for GPUs that need not be there, and reads what each launch takes.

python tests/gpu/ahead.py             # prints the rows of the table in docs/speed.md
python tests/gpu/ahead.py FILE        # compiles every launch, which takes hours, and sums up what FILE holds

FILE has a line of JSON for each launch that was compiled. The second command leaves these out, so that it can be
stopped and started again; it takes the others in an order drawn once, so that what it has done is a sample of all.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels import triton_call

KERNELS = ("row_sums", "column_sums")
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
TOKENS = 80
"""Queries and keys of the calls that are compiled: past the edge at 64 queries, and no multiple of a tile."""


@dataclass(frozen=True)
class Target:
    """A GPU. `shared`: KiB of shared memory that one program may use; `warp`: its threads."""

    name: str
    backend: str
    arch: int | str
    warp: int
    shared: int


TARGETS = {
    each.name: each
    for each in (
        Target("sm_80", "cuda", 80, 32, 163),
        Target("sm_86", "cuda", 86, 32, 99),
        Target("sm_89", "cuda", 89, 32, 99),
        Target("sm_90", "cuda", 90, 32, 227),
        Target("sm_100", "cuda", 100, 32, 227),
        Target("sm_120", "cuda", 120, 32, 99),
        Target("gfx942", "hip", "gfx942", 64, 64),
        Target("gfx1100", "hip", "gfx1100", 32, 64),
    )
}
"""Shared memory: table "Technical Specifications per Compute Capability" of the CUDA programming guide, and the local
data share of AMD's instruction set manuals."""

WIDTHS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512))
"""Channels of queries and keys, and of values."""
FEATURES = ("causal", "masked", "biased", "capped", "sinks", "all")


@dataclass(frozen=True)
class Taken:
    """What one launch takes: bytes of shared memory, registers and spilled bytes of one thread."""

    shared: int
    registers: int
    spilled: int


class Launches:
    """Replaces a kernel and records the arguments of each launch."""

    def __init__(self) -> None:
        self.made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.made.append((args, kwargs))


def call_of(feature: str, dtype: torch.dtype, widths: tuple[int, int]) -> AttentionCall:
    """A causal call of two query heads and one key/value head. widths: of queries and keys, and of values."""
    query, key = (torch.zeros(1, heads, TOKENS, widths[0], dtype=dtype) for heads in (2, 1))
    value = torch.zeros(1, 1, TOKENS, widths[1], dtype=dtype)
    call = AttentionCall(query, key, value, None, causal=True, scaling=0.1)
    if feature in ("masked", "all"):
        window = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(-30)[None, None]
        call = replace(call, mask=window)
    if feature in ("biased", "all"):
        call = replace(call, bias=torch.ones(1, 2, TOKENS, TOKENS))
    if feature in ("capped", "all"):
        call = replace(call, softcap=3.0)
    if feature in ("sinks", "all"):
        call = replace(call, sinks=torch.zeros(1, 2, 1, 1))
    return call


def launches(call: AttentionCall, hopper: bool = False) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of the last launch of each kernel that the call makes, on a Hopper GPU or another."""
    from sinkscope.capture.kernels import triton_kernels

    recorded = {name: Launches() for name in KERNELS}
    with patch.multiple(triton_kernels, **recorded), patch.object(triton_call, "is_hopper", lambda device: hopper):
        triton_call.attend(call)
    return {name: each.made[-1] for name, each in recorded.items()}


def source(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The kernel's source, specialised as a launch with these arguments would specialise it."""
    from triton.compiler import ASTSource

    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value, name = values[parameter.name], parameter.name
        plain = parameter.do_not_specialize
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not plain):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not plain:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def compiled(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: Target) -> Taken:
    """What a launch takes, compiled to the GPU's machine code. Raises
    whatever Triton raises where it cannot compile."""
    import triton
    from triton.backends.compiler import GPUTarget

    from sinkscope.capture.kernels import triton_kernels

    options = {option: kwargs[option] for option in OPTIONS if option in kwargs}
    gpu = GPUTarget(target.backend, target.arch, target.warp)
    built = triton.compile(source(getattr(triton_kernels, name), args, kwargs), gpu, options)
    registers, spilled = of_amd(built.asm["amdgcn"]) if target.backend == "hip" else of_nvidia(built.asm["cubin"])
    return Taken(built.metadata.shared, registers, spilled)


def of_nvidia(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of one thread. The kernels have no local arrays, so that the stack holds what was
    spilled alone."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return _number(r"REG:(\d+)", said), _number(r"STACK:(\d+)", said)


def of_amd(assembly: str) -> tuple[int, int]:
    """Vector registers and bytes of scratch memory of one thread."""
    return _number(r"\.vgpr_count:\s+(\d+)", assembly), _number(r"\.private_segment_fixed_size:\s+(\d+)", assembly)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in what the compiler said")
    return int(found[1])


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel for one call on one GPU."""

    target: str
    kernel: str
    dtype: str
    widths: tuple[int, int]
    feature: str

    def taken(self) -> Taken:
        """Compiles the launch."""
        call = call_of(self.feature, getattr(torch, self.dtype), self.widths)
        args, kwargs = launches(call, self.target == "sm_90")[self.kernel]
        return compiled(self.kernel, args, kwargs, TARGETS[self.target])

    def row(self, taken: Taken) -> str:
        """The launch's row in the table."""
        widths = "/".join(map(str, dict.fromkeys(self.widths)))
        return (
            f"| {self.target} | `{self.kernel}` | {self.dtype} | {widths} | {self.feature} "
            f"| {taken.shared:,} | {taken.registers} | {taken.spilled} |"
        )


def every_launch(targets: Iterable[str] = TARGETS) -> list[Launch]:
    """All launches that are compiled for these GPUs."""
    dtypes = [str(dtype).removeprefix("torch.") for dtype in triton_call.DTYPES]
    return [Launch(*each) for each in product(targets, KERNELS, dtypes, WIDTHS, FEATURES)]


def shown() -> list[Launch]:
    """The launches in the table of docs/speed.md: the least and the most that a call asks for, on two GPUs."""
    return [
        each
        for each in every_launch(("sm_80", "sm_90"))
        if each.feature in ("causal", "all") and each.widths in ((64, 64), (128, 128)) and each.dtype != "float16"
    ]


def compile_all(file: Path) -> None:
    """Compiles every launch that a file of results lacks, and adds a line for each."""
    done = {launch for launch, _ in results(file)}
    left = [each for each in every_launch() if each not in done]
    random.Random(0).shuffle(left)
    for launch in left:
        with tempfile.TemporaryDirectory() as cache, patch.dict("os.environ", {"TRITON_CACHE_DIR": cache}):
            try:
                found: dict[str, Any] = asdict(launch.taken())
            except Exception as error:  # what a compiler raises for a target that it does not know, or cannot fill
                found = {"error": f"{type(error).__name__}: {error}"[:200]}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(launch) | found) + "\n")


def results(file: Path) -> list[tuple[Launch, Taken | str]]:
    """The launches in a file of results, and what each takes, or why it was not compiled."""
    found = []
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        each = json.loads(line)
        launch = Launch(*(each[name] for name in ("target", "kernel", "dtype")), tuple(each["widths"]), each["feature"])
        taken = each["error"] if "error" in each else Taken(*(each[n] for n in ("shared", "registers", "spilled")))
        found.append((launch, taken))
    return found


def summary(found: list[tuple[Launch, Taken | str]]) -> list[str]:
    """A row for each GPU: launches compiled, of how many, not compiled, over the GPU's shared memory, most shared
    memory, launches that spill, up to a width of 128 and beyond, and the most bytes that a thread spills."""
    rows = []
    for target in TARGETS.values():
        own = [(launch, taken) for launch, taken in found if launch.target == target.name]
        built = [(launch, taken) for launch, taken in own if isinstance(taken, Taken)]
        over = sum(taken.shared > target.shared * 1024 for _, taken in built)
        spills = [(max(launch.widths) <= 128, taken.spilled) for launch, taken in built if taken.spilled]
        narrow, most = sum(small for small, _ in spills), max((size for _, size in spills), default=0)
        largest = max((taken.shared for _, taken in built), default=0)
        rows.append(
            f"| {target.name} | {len(built)} | {len(every_launch([target.name]))} | {len(own) - len(built)} | {over} "
            f"| {largest:,} | {narrow} | {len(spills) - narrow} | {most} |"
        )
    return rows


if __name__ == "__main__":
    if len(sys.argv) > 1:
        compile_all(Path(sys.argv[1]))
        print("\n".join(summary(results(Path(sys.argv[1])))))
    else:
        for each in shown():
            print(each.row(each.taken()), flush=True)
