"""The papers that define metrics, and the reading of citations in a metric's source."""

from __future__ import annotations

import re
from dataclasses import dataclass


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
        known = AUTHORS.get(self.arxiv)
        if known is not None:
            return " and ".join(known.split("; "))
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
