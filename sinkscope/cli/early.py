"""Refuses what is wrong for any model, before torch and transformers are imported: that takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sinkscope.errors import SinkscopeError

if TYPE_CHECKING:
    from sinkscope.runs.request import Request

TASK = "trigger"
"""The SPEC of the task that a trigger model brings itself."""


def check_early(
    models: list[str], look: bool = True, data: Any = None, measure: Sequence[str] = (), smoothing: bool = False,
    **options: Any,
) -> Request:  # fmt: skip
    """The request for the first model.

    Raises SinkscopeError for a model that is not there, or for options that fit no model.

    `look`: whether the models are looked for. `options`: other keywords of `sinkscope.scan`. The scan checks them
    again, with what only the model can tell.
    """
    from sinkscope.checkpoints.sources import check_dtype, check_model
    from sinkscope.engine.requested import requested
    from sinkscope.inputs import check_spec
    from sinkscope.runs.openings import no_verdict

    keywords = {"bos": "auto", "first": (), "prepend": (), "images": None, "audio": None, "adapter": None} | options
    extended = bool(keywords.pop("metrics", None))  # such a file may also declare kinds of data
    keywords["measures"] = (*measure, *(["smoothing"] if smoothing else []))
    request = requested(models[0], data, keywords)
    check_dtype(request.dtype)
    if "first" in measure and (why := no_verdict(request.first, request.prepend)):
        raise SinkscopeError(f"--measure first can give no verdict: {why}")
    for spec in () if extended else request.data or ():
        if spec != TASK:
            check_spec(spec)
    for name in models if look else []:
        check_model(name, request.revision, request.allow_pickle)
    return request
