"""The entropy of a matrix's spectrum: exact, cheap, and computed on idle CPU threads or on an NVIDIA GPU."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.capture.precision import as_float64

STRIPS = 4
"""Strips in which a Gram matrix's lower triangle is formed: five eighths of all products, in pieces large enough to be
fast."""

SPECTRA_CUBES = 2**26
FEWEST_SPECTRA = 2
"""By default a sampled metric is measured on the first n sequences of a domain: the largest n with
n min(T, D)^3 <= SPECTRA_CUBES, and never fewer than FEWEST_SPECTRA. On two cores the eigenvalues of 32 sequences of 256
tokens take 0.4 times as long as the forward passes of a model of 30 layers and 576 channels; those of 4 take 0.05."""

WAITING_BYTES, HANDED_BYTES = 256 * 2**20, 2**32
"""About the most memory for matrices that wait for others, and for those that threads solve beside an accelerator."""

ROUNDS, ROUNDS_BYTES = 4, 32 * 2**20
"""Matrices per thread that are solved together, as long as they take up less memory than this. After each product
torch's own threads spin for a while beside the threads that solve: on two cores, 18 matrices of 512 x 512 take half
as long again where each thread gets one at a time."""


def spectrum_entropy(x: Float[Tensor, "batch token channel"]) -> Float[Tensor, " batch"]:
    """Entropy in nats of each x's squared singular values, divided by their sum. Eigenvalues are taken in float64."""
    return SpectrumEntropy.of(x).tensor()


def cheap_spectra(tokens: int, channels: int) -> int:
    """The number of sequences on which a scan measures a sampled metric by default. An eigenproblem costs the cube of
    min(T, D) and keeps few cores busy, so over all sequences of a long scan it would outgrow the forward passes."""
    return max(FEWEST_SPECTRA, SPECTRA_CUBES // min(tokens, channels) ** 3)


def gram_matrix(x: Float[Tensor, "batch token channel"]) -> Float[Tensor, "batch n n"]:
    """The smaller Gram matrix of each x in float64; all NaN where x is not finite. Where `solves` denies it of x's
    device, only its lower triangle is made, on the CPU.

    Products are float64 too: in float32 the error of the few tokens with huge norms (massive activations, sinks) moves
    the entropy of Gemma-3-270M's layer 1 by 1e-5 of its value.
    """
    exact = as_float64(x)
    rows = exact if x.shape[1] <= x.shape[2] else exact.mT
    gram = torch.bmm(rows, rows.mT) if solves(x.device) else _lower_products(rows)
    finite = gram.diagonal(dim1=1, dim2=2).isfinite().all(-1)  # each product is at most the root of two of these
    return torch.where(finite[:, None, None], gram, torch.nan)


def _lower_products(rows: Float[Tensor, "batch n m"]) -> Float[Tensor, "batch n n"]:
    """rows @ rows.mT at and below the diagonal, one strip at a time: LAPACK reads only this half of a symmetric
    matrix."""
    count = rows.shape[1]
    gram = torch.zeros(len(rows), count, count, dtype=torch.float64)
    step = max(1, -(-count // STRIPS))
    for start in range(0, count, step):
        stop = min(start + step, count)
        gram[:, start:stop, :stop] = torch.bmm(rows[:, start:stop], rows[:, :stop].mT).cpu()
    return gram


def _entropy(gram: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """Entropy of one symmetric matrix's eigenvalues over their sum; NaN for a matrix with NaN, which LAPACK refuses."""
    if not gram.diagonal().isfinite().all():
        return gram.new_tensor(torch.nan)
    kept = torch.linalg.eigvalsh(gram).clamp(min=0.0)
    return torch.special.entr(kept / kept.sum()).sum()


def _entropy_of_rows(x: Float[Tensor, "token channel"]) -> Float[Tensor, ""]:
    return _entropy(gram_matrix(x[None])[0])


def solves(device: torch.device) -> bool:
    """Whether eigenvalues are computed on the device itself. On an H200 those of a 2,048 x 2,048 matrix take 25 ms, on
    each of 16 threads of the CPU beside it 750 ms."""
    return device.type == "cuda" and torch.version.cuda is not None


def _entropies(grams: Float[Tensor, "batch n n"]) -> Float[Tensor, " batch"]:
    """`_entropy` of each matrix, where they are; the host does not look at the numbers."""
    finite = grams.diagonal(dim1=1, dim2=2).isfinite().all(-1)
    kept = torch.linalg.eigvalsh(torch.where(finite[:, None, None], grams, 0.0)).clamp(min=0.0)
    found = torch.special.entr(kept / kept.sum(-1, keepdim=True)).sum(-1)
    return torch.where(finite, found, torch.nan)


@dataclass
class SpectrumEntropy:
    """`spectrum_entropy` of each sequence of a batch; the eigenvalues are computed later.

    On a CPU a single matrix would occupy one thread and leave the others idle, and long sequences come one at a time;
    so matrices wait until there are some for each thread. Matrices from an accelerator that `solves` nothing itself are
    solved on the CPU while the accelerator continues with the forward pass.

    `held`: what waits of each sequence, `matrix_bytes` each: x (`as_rows`), or its Gram matrix where that takes less
    memory.
    """

    held: list[Tensor]
    like: Tensor
    as_rows: bool = False
    matrix_bytes: int = 0
    jobs: list[Future[Tensor]] = field(default_factory=list)
    found: Tensor | None = None
    """The entropies, where the device has computed them."""

    @classmethod
    def of(cls, x: Float[Tensor, "batch token channel"]) -> SpectrumEntropy:
        """Keeps a copy of what is solved later. Matrices of an accelerator are solved there, or go to the threads at
        once."""
        if solves(x.device):
            return cls([], x.new_empty(0), found=_entropies(gram_matrix(x)))
        smaller = x[:1].nbytes <= min(x.shape[1:]) ** 2 * torch.float64.itemsize
        as_rows = smaller and x.device.type == "cpu"
        held = [row.clone() for row in x.detach()] if as_rows else [*gram_matrix(x)]
        made = cls(held, x.new_empty(0), as_rows, sum(matrix.nbytes for matrix in held[:1]))
        if x.device.type != "cpu":
            made.start()
        return made

    def start(self) -> None:
        """Submits the matrices to the solving threads and drops them here.

        Each matrix gets one thread: LAPACK's reduction to tridiagonal form gains nothing from more, and keeps the
        others spinning. The threads use torch's LAPACK, not numpy's: two libraries' thread pools slow each other down.
        """
        pool = _single_threads(torch.get_num_threads() if self.like.device.type == "cpu" else _idle_cores())
        self.jobs += [pool.submit(_entropy_of_rows if self.as_rows else _entropy, matrix) for matrix in self.held]
        self.held = []

    def cancel(self) -> None:
        """Cancels every job that no thread has begun; called when the results are no longer needed."""
        self.held = []
        for job in self.jobs:
            job.cancel()

    @property
    def bytes_held(self) -> int:
        """The bytes of the matrices that nothing solves yet, all of them on the CPU."""
        return len(self.held) * self.matrix_bytes

    @property
    def under_way(self) -> int:
        """The number of matrices submitted to threads and not solved yet."""
        return sum(not job.done() for job in self.jobs)

    def tensor(self) -> Tensor:
        """The entropies, [batch]; computes those that are still missing."""
        if self.found is not None:
            return self.found.to(self.like.dtype)
        self.start()
        return torch.stack([job.result() for job in self.jobs]).to(self.like.dtype).to(self.like.device)


def full(waiting: list[SpectrumEntropy]) -> bool:
    """Whether enough matrices wait to occupy every thread, or they take up too much memory."""
    threads = torch.get_num_threads()
    count = sum(len(batch.held) for batch in waiting)
    enough = threads if _held(waiting) >= ROUNDS_BYTES else ROUNDS * threads
    return count >= enough or crowded(waiting)


def crowded(waiting: list[SpectrumEntropy]) -> bool:
    """Whether the matrices that wait, or those that threads solve, take up too much memory."""
    handed = sum(batch.under_way * batch.matrix_bytes for batch in waiting)
    return _held(waiting) >= WAITING_BYTES or handed >= HANDED_BYTES


def _held(waiting: list[SpectrumEntropy]) -> int:
    return sum(batch.bytes_held for batch in waiting)


def solve(waiting: list[SpectrumEntropy]) -> None:
    """Computes the entropies of all waiting batches together."""
    for batch in waiting:
        batch.start()
    wait([job for batch in waiting for job in batch.jobs])


def _idle_cores() -> int:
    """This process's share of the machine's cores. torch's own thread count would not do: launchers set it to 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@cache
def _single_threads(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, "sinkscope-eigenvalues", initializer=lambda: torch.set_num_threads(1))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_single_threads.cache_clear)  # a fork has none of its parent's threads
