"""Makes a Request of what `sinkscope.scan` is called with. A wrong option is refused before torch is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.documents import as_texts, origin
from sinkscope.runs.request import Request, make_request

BEGINNINGS = ("bos", "first", "prepend")
"""Settings of which one value may stand for a list of one."""

FOLDERS = ("images", "audio", "adapter")


def requested(model: Any, data: Any, settings: dict[str, Any]) -> Request:
    """Makes a request of the keywords of `scan`; one that is missing has its default.

    Raises SinkscopeError for settings that are wrong for any model.
    """
    if model is None:
        raise SinkscopeError("a model (torch.nn.Module) or a name is needed, not None")
    name = model if isinstance(model, str) else type(model).__name__
    if name is not model and settings.get("adapter") is not None:
        raise SinkscopeError("adapter= goes with the name of a model: put it into your model object with peft instead")
    settings = settings | {
        **{name: [settings[name]] for name in BEGINNINGS if isinstance(settings.get(name), str | int)},
        **{name: str(settings[name]) for name in FOLDERS if settings.get(name) is not None},
    }
    texts = as_texts(data)
    if texts is not None:
        return make_request(model=name, given="texts", **settings).reading(texts)
    specs = [data] if isinstance(data, str) else data
    if specs is None or (isinstance(specs, list | tuple) and specs and all(isinstance(spec, str) for spec in specs)):
        _refuse_twice(specs or ())
        return make_request(model=name, data=specs, **settings)
    given = ", ".join(map(str, data)) if hasattr(data, "keys") else "token ids"
    return make_request(model=name, given=given, **settings).reading(data)


def _refuse_twice(specs: Sequence[str]) -> None:
    """Raises SinkscopeError where two SPECs are one source: `a.txt` and `./a.txt` would be two datasets of one text."""
    named: dict[tuple[str, str], str] = {}
    for spec in specs:
        before = named.setdefault((origin(spec), spec.partition("#")[2]), spec)
        if before != spec:
            raise SinkscopeError(f"--data {before} and --data {spec} are the same source: give it once")
