"""Names the arm that is not sinkscope's own where it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sinkscope.capture.private_doors import is_out_of_memory
from sinkscope.errors import SinkscopeError, first_line
from sinkscope.experiments.arms.arm import Arm
from sinkscope.lookup import OWN


@contextmanager
def blaming(arm: Arm) -> Iterator[None]:
    """Raises SinkscopeError with the arm's name and its module, where the block fails while an arm from outside is in
    force: the unablated model has run by then. Errors in sinkscope's own words pass, and so does memory that ran
    out."""
    try:
        yield
    except Exception as error:
        module = type(arm).__module__
        own = module.partition(".")[0] == OWN or isinstance(error, SinkscopeError | MemoryError)
        if own or (isinstance(error, RuntimeError) and is_out_of_memory(error)):
            raise
        raise SinkscopeError(f"--arm {arm.name}: {module} fails: {first_line(error)}") from error
