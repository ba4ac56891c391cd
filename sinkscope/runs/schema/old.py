"""Converts manifests and baselines written by sinkscope 0.1 to the current schema.

0.1 wrote the settings as separate fields instead of one request, and named a domain by SPEC and BOS mode in one string.
"""

from __future__ import annotations

from typing import Any

AS_OLD_AS = 2
"""The schema version whose columns mean what those of version 1 did."""
SETTINGS = ("seed", "epsilon", "dormant_rule", "spectra")
UNREADABLE = ("token ids", "pixel_values", "input_features", "input_values")
"""SPECs that 0.1 wrote for data that no command can read again; it did not record folders of pictures or sound."""


def manifest_from_0_1(old: dict[str, Any]) -> dict[str, Any]:
    """Converts a manifest of schema version 1. Raises KeyError or TypeError where it is damaged."""
    kept = {name: value for name, value in old.items() if name not in (*SETTINGS, "bos")}
    data = [_domain(entry, _modes(old["bos"])) for entry in old["data"]]
    return kept | {
        "schema_version": AS_OLD_AS,
        "request": request_from_0_1(old, data),
        "data": data,
        "self_check": dict(old["self_check"]),
        "attention": [site | {"kind": _kind(site["kind"])} for site in old["attention"]],
    }


def request_from_0_1(old: dict[str, Any], data: list[dict[str, Any]]) -> dict[str, Any]:
    """Rebuilds the request from a manifest or baseline of 0.1; `data`: its converted domains."""
    specs = list(dict.fromkeys(entry["spec"] for entry in data))
    given = next((spec for spec in specs if spec.startswith(UNREADABLE)), None)
    return {
        "model": old["model"]["id"],
        "revision": old["model"].get("revision"),
        "data": None if given else specs,
        "given": given,
        "bos": _modes(old["bos"]),
        "seq_len": max(entry["seq_len"] for entry in data),
        "num_sequences": max(entry["sequences"] for entry in data),
        "measures": ["smoothing"] if "smoothing" in old.get("tables", {}) else [],
        "dtype": old["model"].get("dtype") or "auto",
        **{name: old[name] for name in SETTINGS if old.get(name) is not None},
    }


def baseline_from_0_1(old: dict[str, Any]) -> dict[str, Any]:
    """Converts a baseline of schema version 1. Raises KeyError or TypeError where it is damaged."""
    data = [_domain(entry, _modes(old["bos"])) for entry in old["data"]]
    return {
        "schema_version": AS_OLD_AS,
        "sinkscope": old["sinkscope"],
        "request": request_from_0_1(old, data),
        **{name: old[name] for name in ("kind", "model", "first_token", "levels")},
        "data": data,
    }


def _kind(text: str) -> dict[str, Any]:
    """0.1 wrote `sliding:512` where the name and the size stand apart now."""
    name, _, size = text.partition(":")
    return {"name": name, "size": int(size) if size else None}


def _modes(bos: str | list[str]) -> list[str]:
    return [bos] if isinstance(bos, str) else list(bos)


def _domain(entry: dict[str, Any], modes: list[str]) -> dict[str, Any]:
    """Converts one entry of `data`: 0.1 called the displayed name `spec`, and the SPEC, if it wrote one, `source`."""
    name = str(entry["spec"])
    ending = next((f" bos={mode}" for mode in modes if len(modes) > 1 and name.endswith(f" bos={mode}")), "")
    rest = {key: value for key, value in entry.items() if key not in ("spec", "source")}
    mode = ending.removeprefix(" bos=") if ending else modes[0]
    return {"bos": mode, **rest, "domain": name, "spec": entry.get("source", name.removesuffix(ending))}
