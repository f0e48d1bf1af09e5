"""BM25 search in memory (Robertson and Zaragoza 2009, eq. 3.15 with the idf of Lucene, which is never negative)."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

_K1 = 1.2
"""Saturation of a word's count."""
_B = 0.75
"""Normalisation by length."""
_WORD = re.compile(r"\w+")


class Bm25:
    """Index of documents."""

    def __init__(self, documents: Sequence[str]) -> None:
        """Raises ValueError without documents."""
        if not documents:
            raise ValueError("there are no documents to search")
        counts = [Counter(_words(document)) for document in documents]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / len(lengths) or 1.0
        found: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for word, times in count.items():
                found[word].append((i, times * (_K1 + 1) / (times + _K1 * (1 - _B + _B * length / mean))))
        self._weights = {
            word: [
                (i, math.log(1 + (len(documents) - len(entries) + 0.5) / (len(entries) + 0.5)) * weight) for i, weight in entries
            ]
            for word, entries in found.items()
        }

    def search(self, query: str, topk: int) -> list[int]:
        """Positions of at most ``topk`` documents that have a word of the query, best first; ties by position."""
        scores: defaultdict[int, float] = defaultdict(float)
        for word in _words(query):
            for i, weight in self._weights.get(word, ()):
                scores[i] += weight
        return sorted(scores, key=lambda i: (-scores[i], i))[:topk]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
