"""The request of a scan: one record of every setting, written whole into the manifest and the baseline."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.runs.defaults import DORMANT_RULE, EPSILON, check_not_too_large
from sinkscope.runs.dormancy import parse_rule
from sinkscope.runs.openings import BOS_MODES, check_opening, openings
from sinkscope.runs.questions import QUESTIONS, asked_by_all, declared_options, questions_asked
from sinkscope.runs.schema.base import Record, first_fault

Role = Literal["text", "columns", "rounding"]
"""What a setting decides: `text`, which sequences are read; `columns`, what is computed from them; `rounding`, the
last digits of the numbers."""


def _decides(role: Role, default: Any = None) -> Any:
    return Field(default, json_schema_extra={"decides": role})


def _with_options(schema: dict[str, Any]) -> None:
    """Adds the options of the questions to the JSON schema."""
    schema["additionalProperties"] = False
    for name, (question, option) in declared_options().items():
        schema["properties"][name] = option.schema() | {"decides": "columns", "description": question.told(option)}


WATCHED = "watched passes"
"""What a watch has in the place of the kind of object that a scan was given."""


class Request(Record):
    """Everything that a scan is asked for. It is frozen: `model_copy(update=...)` makes another.

    The schema of a field says what it `decides`: `text` (which sequences are read), `columns` (what is computed from
    them) or `rounding` (the last digits). A field that decides nothing changes no number. Every option that a question
    declares is a field too; `options` holds them all.

    Raises SinkscopeError for settings that are wrong for every model.
    """

    model_config = ConfigDict(frozen=True, extra="allow", json_schema_extra=_with_options)

    model: str
    """Hub id, folder, .gguf file or example:NAME; the name of a model object."""
    name: str | None = None
    """What tables, figures and pages call the model; null = its id."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    adapter: str | None = None
    """Folder of a PEFT adapter that is put into the model; null = none."""
    data: tuple[str, ...] | None = _decides("text")
    """SPECs, each a dataset; null = prose, or the model's own task where it has one."""
    given: str | None = _decides("text")
    """Kind of the object passed from Python instead of a SPEC (`token ids`, `pixel_values`, ...). A later scan cannot
    read it again."""
    bos: tuple[str, ...] = _decides("text", ("auto",))
    """How the first token is chosen: auto, always or never. With several, every SPEC has one dataset for each."""
    first: tuple[str, ...] = _decides("text", ())
    """What stands first in each sequence, in place of `bos`: auto, bos, bosxN, none, random, or a text of one token.
    With several, every SPEC has one dataset for each."""
    prepend: tuple[int, ...] = _decides("text", ())
    """Numbers of ordinary tokens drawn to stand before `first`. With several, every SPEC has one dataset for each."""
    generate: int | None = _decides("text")
    """Number of tokens that the model writes after each sequence, greedily; null = none. They are measured too."""
    images: str | None = _decides("text")
    """Folder of pictures; each is one sequence."""
    audio: str | None = _decides("text")
    """Folder of recordings; each is one sequence."""
    prompt: str | None = _decides("text")
    """The text that goes with each picture, or that a decoder reads with each recording."""
    seq_len: int | None = _decides("text")
    """Tokens per sequence; null = 256 for text, or the model's positions where these are fewer; all tokens of an object
    passed from Python; a task's own length."""
    num_sequences: int | None = _decides("text")
    """Sequences per SPEC; null = 32 for text, all sequences of an object passed from Python, a task's own number."""
    seed: int = _decides("text", 0)
    """Seed of the draw of documents, and of the tokens of the SPECs random and repeated."""
    epsilon: float = _decides("columns", EPSILON)
    """A head has a sink where alpha_0 exceeds this."""
    dormant_rule: str = _decides("columns", DORMANT_RULE)
    """Which heads are dormant: NAME<x or NAME>x, applied to the mean of a column of heads.csv."""
    spectra: int | None = _decides("columns")
    """Number of first sequences of each dataset that matrix_entropy, and what needs spectra in smoothing.csv, is
    measured on; null = as many as are cheap."""
    lengths: tuple[int, ...] | None = _decides("columns")
    """The prefixes of the length curve, ascending; null = 64, 128, 256, ... The whole sequence is added to them."""
    measures: tuple[str, ...] = _decides("columns", ())
    """The measurements made on request (`--measure NAME`), in one order however they were listed."""
    batch_size: int | None = _decides("rounding")
    """Sequences per forward pass; null = chosen for the device."""
    dtype: str = _decides("rounding", "auto")
    """The dtype asked for; auto = the checkpoint's own."""
    device: str = _decides("rounding", "auto")
    """The device asked for."""
    device_map: str | dict[str, int | str] | None = _decides("rounding")
    """How the model is spread over devices and the disk; null = the model is on one device."""
    trust_remote_code: bool = False
    """Whether Python code of the checkpoint may run."""
    allow_pickle: bool = False
    """Whether pickled weights may be loaded."""
    self_check: bool = True
    """Whether one sequence is compared with a reference before the scan."""
    _handed: Any = PrivateAttr(None)
    _optional: frozenset[str] = PrivateAttr(frozenset())

    @model_validator(mode="before")
    @classmethod
    def _options(cls, given: Any) -> Any:
        """Adds the options that are not given, and refuses fields that nobody declares."""
        if not isinstance(given, dict):
            return given
        declared = declared_options()
        for name in declared.keys() & cls.model_fields.keys():
            raise SinkscopeError(
                f"--measure {declared[name][0].name}: its option {name} is one of every scan: rename it"
            )
        unknown = sorted(map(str, given.keys() - cls.model_fields.keys() - declared.keys()))
        if unknown:
            cls._measures(given.get("measures"))  # a question whose package is absent has fields of its own
            raise ValueError(f"unknown field {unknown[0]!r}{did_you_mean(unknown[0], [*cls.model_fields, *declared])}")
        options = {name: option.read(given.get(name, option.default)) for name, (_, option) in declared.items()}
        return {**given, **options}

    @field_validator("measures", mode="before")
    @classmethod
    def _measures(cls, names: Any) -> Any:
        """Puts the measurements into their order, so that a scan resumes however they were listed."""
        listed = [names] if isinstance(names, str) else names
        is_names = isinstance(listed, list | tuple) and all(isinstance(name, str) for name in listed)
        return questions_asked(listed) if is_names else names  # what is none is refused by its type

    @field_validator("lengths", mode="after")
    @classmethod
    def _lengths(cls, lengths: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Puts the lengths into their order, each once, so that a scan resumes however they were listed."""
        return tuple(sorted(set(lengths))) if lengths else None

    @model_validator(mode="after")
    def _checked(self) -> Request:
        for words in _wrong_data(self), _wrong_numbers(self), _wrong_options(self):
            if words:
                raise SinkscopeError(words)
        for name in ("seq-len", "num-sequences", "batch-size", "seed", "spectra", "generate"):
            check_not_too_large(name, getattr(self, name.replace("-", "_")))
        parse_rule(self.dormant_rule)
        return self

    def part(self, *roles: Role) -> dict[str, Any]:
        """The settings that decide any of `roles`, as plain data by name."""
        names = {name for name, field in type(self).model_fields.items() if _role(field) in roles}
        names |= self.options.keys() if "columns" in roles else set()
        return self.model_dump(mode="json", include=names)

    @property
    def options(self) -> dict[str, Any]:
        """The options of all questions, by name."""
        return dict(self.__pydantic_extra__ or {})

    def of_model(self, model: str, **settings: Any) -> Request:
        """A request for the same text and columns of another model; `settings` are the other fields."""
        kept = {name: getattr(self, name) for name in self.part("text", "columns")}
        return make_request(model=model, **{**kept, **settings})

    def reading(self, handed: Any) -> Request:
        """A copy of the request with the object passed from Python instead of a SPEC; the object is never saved."""
        made = self.model_copy()
        made._handed = handed
        return made

    @property
    def handed(self) -> Any:
        """The object passed from Python instead of a SPEC; None where there is none."""
        return self._handed

    @property
    def watched(self) -> bool:
        """Whether it is no scan's, but says what a watch measured."""
        return self.given == WATCHED

    @property
    def optional(self) -> frozenset[str]:
        """The measurements that `all` alone asks: a scan leaves out those that its model or its inputs do not allow.
        They are not saved, since a saved request names what was measured."""
        return self._optional


def make_request(**settings: Any) -> Request:
    """Makes a Request. Raises SinkscopeError, one line, where a setting is wrong.

    A setting that asks a question too, such as `first`, adds it to the measurements.
    """
    name, measures = settings.get("name"), settings.get("measures", ())
    if isinstance(name, str) and not name.strip():
        raise SinkscopeError(f"--name {name!r}: a name that a table can show is needed")
    also = [question.name for question in QUESTIONS.values() if any(settings.get(name) for name in question.asked_by)]
    if also:
        settings["measures"] = (*questions_asked(measures), *also)
    try:
        made = Request(**settings)
    except ValidationError as error:
        raise SinkscopeError(first_fault(error)) from None
    made._optional = asked_by_all(measures) - {*also}
    return made


def _role(field: Any) -> str | None:
    extra = field.json_schema_extra
    return extra.get("decides") if isinstance(extra, dict) else None


def _wrong_data(request: Request) -> str | None:
    """Says what is wrong with the choice of data; None if nothing is."""
    read = request.data is not None or request.given is not None
    if request.images is not None and request.audio is not None:
        return "--images and --audio: give one of them, not both"
    for name, folder in (("images", request.images), ("audio", request.audio)):
        if read and folder is not None:
            return f"--{name} and --data: give one of them, not both"
    if request.prompt is not None and request.images is None and request.audio is None:
        return "--prompt is the text that goes with --images or --audio: give one of them"
    for mode in request.bos:
        if mode not in BOS_MODES:
            return f"--bos {mode!r}: choose one of {', '.join(BOS_MODES)}{did_you_mean(mode, BOS_MODES)}"
    if not request.bos or len(set(request.bos)) < len(request.bos):
        return "--bos names a mode twice, or none"
    if request.data is not None and len(set(request.data)) < len(request.data):
        return "--data names the same source twice"
    return _wrong_opening(request)


def _wrong_opening(request: Request) -> str | None:
    """Says what is wrong with --first and --prepend; None if nothing is. Raises SinkscopeError for a bad value."""
    if not request.first and not request.prepend:
        return None
    if request.bos != ("auto",):
        return "--bos and --first or --prepend: both say how a sequence begins; give one (--first bos, --first none)"
    if request.given is not None or request.images is not None or request.audio is not None:
        return "--first and --prepend change how text begins: they go with --data alone"
    for name, values in (("first", request.first), ("prepend", request.prepend)):
        if len(set(values)) < len(values):
            return f"--{name} names a value twice"
    for opening in openings(request.first, request.prepend):
        check_opening(opening)
    return None


def _wrong_numbers(request: Request) -> str | None:
    """Names the first number that is out of its range; None if all are in range."""
    if request.seq_len is not None and request.seq_len < 2:
        return f"--seq-len {request.seq_len}: at least 2 tokens are needed (bos_mass starts at the second)"
    for name, least in (("num_sequences", 1), ("batch_size", 1), ("generate", 1)):
        number = getattr(request, name)
        if number is not None and number < least:
            return f"--{name.replace('_', '-')} {number}: at least {least} is needed"
    if request.lengths and request.lengths[0] < 2:
        return f"--lengths {request.lengths[0]}: at least 2 tokens are needed (bos_mass starts at the second)"
    if request.seed < 0:
        return f"--seed {request.seed}: 0 or more is needed"
    if not 0 < request.epsilon < 1:
        return f"--epsilon {request.epsilon}: a probability between 0 and 1 is needed"
    if request.spectra is not None and request.spectra < 0:
        return f"--spectra {request.spectra}: a number of sequences is needed, 0 for none"
    return None


def _wrong_options(request: Request) -> str | None:
    """Names the first option that is given and belongs to a question that is not asked; None if there is none."""
    for name, (question, option) in declared_options().items():
        if request.options[name] != option.default and question.name not in request.measures:
            return f"{option.flag} belongs to --measure {question.name}: ask that too, or leave it out"
    return None
