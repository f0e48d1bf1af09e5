"""BM25, compared with its formula."""

import math
from random import Random

from trainer.agents.native.bm25 import Bm25


def test_bm25_ranks_as_the_formula() -> None:
    rng = Random(0)
    documents = [" ".join(rng.choice("abcdef") for _ in range(rng.randint(1, 9))) for _ in range(30)]
    mean = sum(len(document.split()) for document in documents) / len(documents)
    for query in ("a", "b c", "f f e"):
        expected = {}
        for i, document in enumerate(documents):
            words, score = document.split(), 0.0
            for word in query.split():
                n, times = sum(word in other.split() for other in documents), words.count(word)
                idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
                score += idf * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * len(words) / mean))
            if score > 0:
                expected[i] = score
        found = Bm25(documents).search(query, 30)
        assert found == sorted(expected, key=lambda i: (-round(expected[i], 9), i))
        assert Bm25(documents).search(query, 2) == found[:2]
    assert Bm25(documents).search("zzz", 3) == []
