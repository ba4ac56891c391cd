"""The literature: papers that define metrics, and published numbers to compare a run with."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from sinkscope.runs.per_sequence import spread
from sinkscope.runs.schema.summary import Published


@dataclass(frozen=True)
class Paper:
    """A paper on arXiv.

    Attributes:
        arxiv: its arXiv number, such as `2410.10781`.
        first_author, title: the family name that sources cite it by, its first author's but for 2605.08453, and its
            newest version's title; None for a paper that PAPERS does not hold.
    """

    arxiv: str
    first_author: str | None = None
    title: str | None = None

    @property
    def authors(self) -> str | None:
        """All authors as BibTeX writes them; the first `and others` where no more are known, None where none is."""
        authors = AUTHORS.get(self.arxiv)
        if authors is not None:
            return " and ".join(authors.split("; "))
        return f"{self.first_author} and others" if self.first_author else None

    @property
    def year(self) -> int:
        """The year of its first version, read from the number."""
        return 2000 + int(self.arxiv[:2])

    @property
    def url(self) -> str:
        """Address of its abstract."""
        return f"https://arxiv.org/abs/{self.arxiv}"


PAPERS = {
    paper.arxiv: paper
    for paper in (
        Paper(
            "2306.12929",
            "Bondarenko",
            "Quantizable Transformers: Removing Outliers by Helping Attention Heads Do Nothing",
        ),
        Paper("2309.17453", "Xiao", "Efficient Streaming Language Models with Attention Sinks"),
        Paper("2402.17762", "Sun", "Massive Activations in Large Language Models"),
        Paper("2410.10781", "Gu", "When Attention Sink Emerges in Language Models: An Empirical View"),
        Paper(
            "2410.10819",
            "Xiao",
            "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads",
        ),
        Paper(
            "2410.13835",
            "Guo",
            "Active-Dormant Attention Heads: Mechanistically Demystifying Extreme-Token Phenomena in LLMs",
        ),
        Paper("2410.13846", "Zhang", "SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction"),
        Paper("2410.17174", "Kaul", "From Attention to Activation: Unravelling the Enigmas of Large Language Models"),
        Paper("2411.07191", "Yu", "The Super Weight in Large Language Models"),
        Paper("2503.22329", "Owen", "A Refined Analysis of Massive Activations in LLMs"),
        Paper("2504.02732", "Barbero", "Why do LLMs attend to the first token?"),
        Paper("2504.03889", "Sandoval-Segura", "Identifying and Evaluating Inactive Heads in Pretrained LLMs"),
        Paper(
            "2510.06477",
            "Queipo-de-Llano",
            "Attention Sinks and Compression Valleys in LLMs are Two Sides of the Same Coin",
        ),
        Paper("2512.22213", "Wong", "On the Existence and Behaviour of Secondary Attention Sinks"),
        Paper(
            "2603.05498",
            "Sun",
            "The Spike, the Sparse and the Sink: Anatomy of Massive Activations and Attention Sinks",
        ),
        Paper(
            "2605.08453",
            "Lampert",
            "Sink vs. diagonal patterns as mechanisms for attention switch and oversmoothing prevention",
        ),
    )
}
"""Every paper that is the source of a metric or of a published number, by arXiv number."""

AUTHORS = {
    "2306.12929": "Bondarenko, Yelysei; Nagel, Markus; Blankevoort, Tijmen",
    "2309.17453": "Xiao, Guangxuan; Tian, Yuandong; Chen, Beidi; Han, Song; Lewis, Mike",
    "2402.17762": "Sun, Mingjie; Chen, Xinlei; Kolter, J. Zico; Liu, Zhuang",
    "2410.10781": "Gu, Xiangming; Pang, Tianyu; Du, Chao; Liu, Qian; Zhang, Fengzhuo; Du, Cunxiao; Wang, Ye; Lin, Min",
    "2410.10819": "Xiao, Guangxuan; Tang, Jiaming; Zuo, Jingwei; Guo, Junxian; Yang, Shang; Tang, Haotian; "
    "Fu, Yao; Han, Song",
    "2410.13835": "Guo, Tianyu; Pai, Druv; Bai, Yu; Jiao, Jiantao; Jordan, Michael I.; Mei, Song",
    "2410.13846": "Zhang, Xuan; Du, Cunxiao; Du, Chao; Pang, Tianyu; Gao, Wei; Lin, Min",
    "2410.17174": "Kaul, Prannay; Ma, Chengcheng; Elezi, Ismail; Deng, Jiankang",
    "2411.07191": "Yu, Mengxia; Wang, De; Shan, Qi; Reed, Colorado J.; Wan, Alvin",
    "2503.22329": "Owen, Louis; Roy Chowdhury, Nilabhra; Kumar, Abhay; Güra, Fabian",
    "2504.02732": "Barbero, Federico; Arroyo, Álvaro; Gu, Xiangming; Perivolaropoulos, Christos; "
    "Bronstein, Michael; Veličković, Petar; Pascanu, Razvan",
    "2504.03889": "Sandoval-Segura, Pedro; Wang, Xijun; Panda, Ashwinee; Goldblum, Micah; Basri, Ronen; "
    "Goldstein, Tom; Jacobs, David",
    "2510.06477": "Queipo-de-Llano, Enrique; Arroyo, Álvaro; Barbero, Federico; Dong, Xiaowen; "
    "Bronstein, Michael; LeCun, Yann; Shwartz-Ziv, Ravid",
    "2512.22213": "Wong, Jeffrey T. H.; Zhang, Cheng; Mahon, Louis; Luk, Wayne; Isopoussu, Anton; Zhao, Yiren",
    "2603.05498": "Sun, Shangwen; Canziani, Alfredo; LeCun, Yann; Zhu, Jiachen",
    "2605.08453": "Súkeník, Peter; López Amado, Cristina; Lampert, Christoph H.; Mondelli, Marco",
}
"""The authors of papers, family names first, by arXiv number."""

NUMBER = re.compile(r"\b\d{2}(?:0[1-9]|1[0-2])\.\d{5}\b")
"""An arXiv number since 2015: year, month, five digits."""


def cited_papers(source: str) -> tuple[Paper, ...]:
    """The papers that a source such as `Gu et al. 2410.10781 table 1` cites, in order of appearance, each once."""
    return tuple(PAPERS.get(number, Paper(number)) for number in dict.fromkeys(NUMBER.findall(source)))


# Published numbers to compare a run with: data/published.csv, one row per number, each with its source.
#
# A row says which column of the atlas it may stand beside, and on what length, kind of text, first token and dtype it
# was measured. It is comparable with a run that was measured alike. A row without such a column says why no run is.


NATURAL, ANY = "natural", "any"
KINDS = {"random": "random", "repeated": "repeated", "code": "code"}
"""The kind of text of a SPEC; every other SPEC is natural language."""
PLAIN = "auto"
"""How the first token is chosen where nobody asks for another: as the tokenizer does by itself."""
PREFIX = 64
"""Tokens of the prefix that is measured beside the whole sequence."""


@dataclass(frozen=True)
class Setting:
    """What decides whether a run's numbers may be held against published ones.

    `tokens`, `shortest`: of the longest and of the shortest sequence, None where that is not known. `kind`: natural,
    random, repeated or code. `bos`: whether BOS is the first token. `opening`: how the first token was chosen, as the
    manifest says it.
    """

    tokens: int
    shortest: int | None
    kind: str
    bos: bool
    opening: str
    dtype: str | None


@dataclass(frozen=True)
class PublishedNumber:
    """A row of data/published.csv.

    Attributes:
        ids: hub ids of the model.
        number: the number as a summary shows it.
        beside: the column of the atlas that it may stand beside; empty where no column is measured alike.
        tokens, kind, bos, dtype: the setting; None or empty where the source does not state it, and for `kind` "any"
            where the number does not depend on the text.
        why: why no column is measured alike; empty where one is.
    """

    ids: tuple[str, ...]
    number: Published
    beside: str
    tokens: int | None
    kind: str
    bos: bool | None
    dtype: str
    why: str

    def difference(self, run: Setting) -> str:
        """Why the number cannot be held against a run of this setting; empty where it can."""
        if not self.beside:
            return self.why
        if self.kind == ANY:
            return ""
        prefixed = self.tokens == PREFIX and self.beside.endswith(f"_{PREFIX}")
        alike = (run.shortest or 0) >= PREFIX if prefixed else self.tokens == run.shortest == run.tokens
        if not alike:
            return f"measured at T = {self.tokens}, the run at T = {spread([run.shortest, run.tokens])}"
        if self.kind != run.kind:
            return f"measured on {self.kind} text, the run on {run.kind} text"
        if self.bos is not None and self.bos != run.bos:
            return f"measured {_with(self.bos)} BOS, the run {_with(run.bos)} it"
        if self.bos is None and run.opening != PLAIN:
            return f"measured on plain text, the run with another first token ({run.opening})"
        if self.dtype and self.dtype != run.dtype:
            return f"measured in {self.dtype}, the run in {run.dtype}"
        return ""


def _with(bos: bool) -> str:
    return "with" if bos else "without"


def kind_of_text(spec: str) -> str:
    """The kind of text that a SPEC reads."""
    return KINDS.get(spec, NATURAL)


@cache
def published_numbers() -> tuple[PublishedNumber, ...]:
    """Every row of the file."""
    text = (files("sinkscope") / "data" / "published.csv").read_text("utf-8")
    return tuple(_read(row) for row in csv.DictReader(text.splitlines()))


def _read(row: dict[str, str]) -> PublishedNumber:
    number = {name: row[name] for name in ("model", "metric", "value", "unit", "text", "setting", "source")}
    return PublishedNumber(
        ids=tuple(row["ids"].split("|")),
        number=Published.model_validate(number | {"not_comparable": row["why"] or None}),
        beside=row["beside"],
        tokens=int(row["tokens"]) if row["tokens"] else None,
        kind=row["kind"],
        bos={"yes": True, "no": False}.get(row["bos"]),
        dtype=row["dtype"],
        why=row["why"],
    )


def numbers_of(model_id: str) -> list[PublishedNumber]:
    """The rows of a model, by its hub id in any case; empty where none is known."""
    return [row for row in published_numbers() if model_id.lower() in (name.lower() for name in row.ids)]


def published_for(model_id: str) -> list[Published]:
    """The numbers of a model as a summary holds them."""
    return [row.number for row in numbers_of(model_id)]
