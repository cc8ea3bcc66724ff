"""How much of a summary is copied? Scores of texts, from 0 to 1.

    python tools/winrate.py models/tldr/ppo data --judge benchmarks/copying.py:copied
    python rloo.py --task tldr --gold_fn benchmarks/copying.py:novel_bigrams

winrate.py prints the mean of each side. As `--gold_fn` a score is a curve, `objective/gold_score`.
"""

import re


def words(text: str) -> list[str]:
    """Words in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


def common_words(a: list[str], b: list[str]) -> int:
    """The length of the longest common subsequence."""
    lengths = [0] * (len(b) + 1)  # with the first i words of b
    for word in a:
        before = lengths[:]
        for i, other in enumerate(b):
            longest = max(before[i + 1], lengths[i])
            lengths[i + 1] = before[i] + 1 if word == other else longest
    return lengths[-1]


def copied(queries: list[str], responses: list[str]) -> list[float]:
    """The share of a response's words in its longest common subsequence with the query.

    It is 1 if deleting words of the query gives the response.
    """
    pairs = [(words(x), words(y)) for x, y in zip(queries, responses, strict=True)]
    return [common_words(query, response) / max(len(response), 1) for query, response in pairs]


def novel_bigrams(queries: list[str], responses: list[str]) -> list[float]:
    """The share of a response's bigrams that the query does not have (See et al. 2017)."""
    shares = []
    for query, response in zip(queries, responses, strict=True):
        known, bigrams = (
            list(zip(x, x[1:], strict=False)) for x in (words(query), words(response))
        )
        novel = [bigram not in known for bigram in bigrams]
        shares.append(sum(novel) / max(len(novel), 1))
    return shares


def rouge_l(queries: list[str], responses: list[str], completion: list[str]) -> list[float]:
    """ROUGE-L (F1) with the reference in the column `completion`; needs rouge-score."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    pairs = zip(completion, responses, strict=True)
    return [scorer.score(*pair)["rougeL"].fmeasure for pair in pairs]
