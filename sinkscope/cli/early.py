"""Refuses what is wrong for any model, before torch and transformers are imported: that takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkscope.runs.request import Request


def check_early(models: list[str], **options: Any) -> Request:
    """The request for the first model.

    Raises SinkscopeError for a model that is not there, or for options that fit no model.

    `options`: keywords of `sinkscope.scan`. The scan checks them again, with what only the model can tell.
    """
    from sinkscope.checkpoints.names import check_dtype, check_model
    from sinkscope.inputs import check_spec
    from sinkscope.runs.request import make_request

    settings = {name: value for name, value in options.items() if name not in ("metrics", "smoothing")}
    if isinstance(settings.get("bos"), str):
        settings["bos"] = [settings["bos"]]
    for folder in ("images", "audio"):
        settings |= {folder: str(settings[folder])} if settings.get(folder) else {}
    request = make_request(model=models[0], **settings)
    check_dtype(request.dtype)
    for spec in request.data or ():
        check_spec(spec)
    for name in models if len(models) == 1 else []:  # of several, one that is not there stops no other
        check_model(name, request.revision, request.allow_pickle)
    return request
