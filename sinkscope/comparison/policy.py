"""The gate's policy: how far each metric may move at each level; read from TOML, or the built-in default."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sinkscope.errors import SinkscopeError
from sinkscope.runs.catalogue import near_column, per_sequence
from sinkscope.runs.schema.base import first_fault

if TYPE_CHECKING:
    from sinkscope.comparison.baseline import Baseline

SECTION = "tool.sinkscope.check"
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]


class Rule(BaseModel):
    """How far one metric may move at one level."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str
    """A column of heads.csv or layers.csv that has a value for each sequence."""
    level: Literal["summary", "layer", "head"]
    """head: every head is judged. layer: every layer, with head metrics averaged over its heads. summary: every
    stream's mean."""
    max_change: Positive | None = None
    """Largest allowed |now - baseline|, in the metric's unit."""
    max_relative_change: Positive | None = None
    """Largest allowed |now - baseline| as a share of |baseline|. Where both bounds are given, the larger one holds."""
    significance: Share | None = None
    """The rule's own significance where the run read other text; None takes the policy's."""

    @model_validator(mode="after")
    def _bounded(self) -> Rule:
        if self.max_change is None and self.max_relative_change is None:
            raise ValueError("give max_change or max_relative_change")
        return self


class Policy(BaseModel):
    """The rules of a check, and what they share.

    Attributes:
        significance: where the run read other text, a change counts if its false discovery rate, over all comparisons
            of the check, is below this.
        same_precision: factor on every bound where the run read the baseline's text and both were computed in float32:
            the bounds need no room for half-precision rounding there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    significance: Share = 0.001
    same_precision: Share = 1.0
    rules: list[Rule] = Field(min_length=1)


def _rule(metric: str, level: Literal["summary", "layer", "head"], change: float) -> Rule:
    return Rule(metric=metric, level=level, max_change=change)


def _share(metric: str, level: Literal["summary", "layer", "head"], share: float) -> Rule:
    return Rule(metric=metric, level=level, max_relative_change=share)


DEFAULT = Policy(
    same_precision=0.1,
    rules=[
        _rule("bos_mass", "head", 0.03),
        _rule("bos_mass", "layer", 0.015),
        _rule("bos_mass", "summary", 0.005),
        _rule("entropy", "head", 0.1),
        _rule("honor", "head", 0.05),
        _rule("residual_write_ln", "head", 0.05),
        _rule("previous_mass", "head", 0.004),
        _rule("qk_cos_first", "head", 0.004),
        _rule("cos_first_residual", "layer", 0.01),
        _share("norm_first", "layer", 0.05),
        _share("inf_norm", "layer", 0.05),
    ],
)
"""Chosen from scans of Gemma-3-270M over the same text: computing in bfloat16 uses less than a quarter of each bound;
another batch size in float32 uses less than a thousandth of the float32 bound. examples/gate_power.py shows what the
policy catches."""


def read_policy(path: str | Path | None = None, folder: Path | None = None, baseline: Baseline | None = None) -> Policy:
    """Reads the policy: from the TOML file `path`, or from [tool.sinkscope.check] in pyproject.toml, or the default.

    In a file of its own the keys stand at the top or under [tool.sinkscope.check].

    Args:
        folder: the folder of pyproject.toml; None means the current folder.
        baseline: the baseline to judge by; rules may name its metrics, also those that its user defined.

    Raises SinkscopeError for an unreadable file, an unknown key or metric, or a rule without a bound.
    """
    where = "" if path is None else str(path)
    if path is None:
        project = (folder or Path()) / "pyproject.toml"
        section = _section(_parsed(project), project) if project.is_file() else None
        if section is None:
            return DEFAULT
        data, where = section, f"{project} [{SECTION}]"
    else:
        data = _parsed(Path(path))
        section = _section(data, Path(path))
        data = data if section is None else section
    policy = _validated(data, where)
    for rule in policy.rules:
        _check_metric(rule, baseline, where)
    return policy


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SinkscopeError(f"cannot read the policy {path}: {error.strerror}") from None
    except ValueError as error:  # TOML's own error, bytes that are not UTF-8, a number of too many digits
        raise SinkscopeError(f"policy {path} is not TOML: {error}") from None
    except RecursionError:
        raise SinkscopeError(f"policy {path} is damaged: its values are nested too deeply") from None


def _section(data: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """The policy's section; None where the file has none. Raises SinkscopeError where it is no table."""
    section: Any = data
    for key in SECTION.split("."):
        if not isinstance(section, dict) or key not in section:
            return None
        section = section[key]
    if not isinstance(section, dict):
        raise SinkscopeError(f"{path} [{SECTION}]: it is no table; write the rules under it")
    return section


def _validated(data: dict[str, Any], where: str) -> Policy:
    try:
        policy = Policy.model_validate(data)
    except ValidationError as error:
        raise SinkscopeError(f"{where}: {first_fault(error)}") from None
    return policy


def _check_metric(rule: Rule, baseline: Baseline | None, where: str) -> None:
    """Raises SinkscopeError where neither the catalogue nor the baseline has the rule's metric at its level."""
    heads, layers = set(per_sequence("heads")), set(per_sequence("layers"))
    for (_, level), held in baseline.levels.items() if baseline is not None else ():
        (heads if level == "head" else layers).update(held.mean, held.sem)
    if rule.metric not in heads | layers:
        holder = "" if baseline is None else ": the baseline does not hold it"
        near = near_column(rule.metric, heads | layers)
        raise SinkscopeError(f"{where}: unknown metric {rule.metric!r}{holder}; `sinkscope metrics` lists them{near}")
    if rule.level == "head" and rule.metric not in heads:
        raise SinkscopeError(f"{where}: {rule.metric} is a layer metric: it has no values at level head")
