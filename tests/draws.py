"""Draws of an answer's first token, and how far they are from what the logits say."""

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import chi2_contingency, chisquare
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

NUM_DRAWS = 2_000
MIN_EXPECTED = 5  # draws of a token; rarer ones are counted together, as the statistic wants


def distribution(
    logits: npt.NDArray[np.float32], *, temperature: float, top_p: float
) -> dict[int, float]:
    """The probability of each token that can be drawn, by transformers' own warpers, in its order:
    temperature, then top_p."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    ids = torch.zeros(1, 1, dtype=torch.long)
    probabilities = warpers(ids, torch.tensor(logits)[None].double()).softmax(-1)[0]
    return {int(i): float(probabilities[i]) for i in probabilities.nonzero()[:, 0]}


def p_value(drawn: Counter[int], expected: Mapping[int, float]) -> float:
    """How likely draws from `expected` are at least this far from it; 0 where one cannot be."""
    if not set(drawn) <= set(expected):
        return 0.0
    num_draws = drawn.total()
    rare = {token for token, p in expected.items() if p * num_draws < MIN_EXPECTED}
    observed, means = merged(drawn, rare), merged(expected, rare)
    total = sum(means.values())
    tokens = [token for token in means if means[token] > 0]
    return float(
        chisquare(
            [observed.get(token, 0) for token in tokens],
            [means[token] / total * num_draws for token in tokens],
        ).pvalue
    )


def p_value_between(one: Counter[int], other: Counter[int]) -> float:
    """How likely two samples of one distribution are at least this far from each other."""
    tokens = set(one) | set(other)
    rare = {token for token in tokens if one[token] + other[token] < 2 * MIN_EXPECTED}
    rows = [merged(one, rare), merged(other, rare)]
    columns = sorted({token for row in rows for token, count in row.items() if count})
    return float(chi2_contingency([[row.get(c, 0) for c in columns] for row in rows]).pvalue)


def merged(values: Mapping[int, float], rare: Iterable[int]) -> dict[int, float]:
    """The values with those of the rare tokens as one, under the id -1."""
    rare = set(rare)
    kept = {token: value for token, value in values.items() if token not in rare}
    left = sum(value for token, value in values.items() if token in rare)
    return {**kept, -1: left} if left else kept
