"""What `affine_divergence.py` computes from its runs: scores by setting, method and seed; leads, slopes, intervals."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy import stats


class Setting(NamedTuple):
    """All of a run but its method, learning rate and seed."""

    family: str
    activation: str
    width: int
    depth: int
    batch_size: int


Scores = dict[Setting, dict[str, dict[int, float]]]  # setting -> method -> seed -> test accuracy


def best_rate(records: Iterable[dict]) -> float:
    """The learning rate of the highest validation accuracy; of equal ones the smallest."""
    return max(records, key=lambda record: (record["validation_accuracy"], -record["lr"]))["lr"]


def setting_of(record: dict) -> Setting:
    return Setting(*(record[name] for name in Setting._fields))


def final_runs(records: list[dict]) -> list[dict]:
    """The runs at the chosen learning rate of their cell: the best one of the first seed, which tried them all."""
    searched = defaultdict(list)
    for record in records:
        if record["seed"] == 0:
            searched[setting_of(record), record["method"]].append(record)
    chosen = {cell: best_rate(tried) for cell, tried in searched.items()}
    return [record for record in records if record["lr"] == chosen.get((setting_of(record), record["method"]))]


def scores_of(finals: list[dict]) -> Scores:
    scores: Scores = defaultdict(lambda: defaultdict(dict))
    for record in finals:
        scores[setting_of(record)][record["method"]][record["seed"]] = record["test_accuracy"]
    return scores


def lead(scores: Scores, settings: list[Setting], method: str, other: str) -> dict[int, list[float]]:
    """By seed: how far `method` is ahead of `other` in each setting; seeds that some setting lacks are left out."""
    seeds = [set(scores[s][method]) & set(scores[s][other]) for s in settings]
    common = set.intersection(*seeds) if seeds else set()
    return {seed: [scores[s][method][seed] - scores[s][other][seed] for s in settings] for seed in sorted(common)}


def growth(leads: dict[int, list[float]], settings: list[Setting], axis: str) -> list[float]:
    """By seed: the least-squares slope of the lead per doubling of `axis` (width or depth), the other one held."""
    sizes = np.array([[1, np.log2(s.width), np.log2(s.depth)] for s in settings])
    column = ("", "width", "depth").index(axis)
    if len(settings) == 0 or np.linalg.matrix_rank(sizes) < 3:
        return []
    return [float(np.linalg.lstsq(sizes, np.array(values), rcond=None)[0][column]) for values in leads.values()]


def main_batch(scores: Scores, family: str) -> int:
    """The batch size that is not varied: the one with the most nets."""
    sizes = [setting.batch_size for setting in scores if setting.family == family]
    return max(dict.fromkeys(sizes), key=sizes.count)


def nets_at_main_batch(scores: Scores, family: str) -> list[Setting]:
    batch = main_batch(scores, family)
    return sorted(s for s in scores if s.family == family and s.batch_size == batch)


def middle_net(scores: Scores, family: str) -> list[Setting]:
    """The settings of the net on which the batch size is varied, by batch size."""
    nets = [setting[:4] for setting in scores if setting.family == family]
    middle = max(dict.fromkeys(nets), key=nets.count)
    return sorted(setting for setting in scores if setting[:4] == middle)


def middle_settings(scores: Scores) -> list[Setting]:
    """Those in which learning rates were searched at every scale: the middle nets, with any activation."""
    middles = {family: middle_net(scores, family)[0] for family in dict.fromkeys(s.family for s in scores)}
    return sorted(s for s in scores if (s.width, s.depth) == middles[s.family][2:4])


def batch_slope(scores: Scores, family: str, method: str):
    """`scipy.stats.linregress` of the accuracy on log2(batch size) over all seeds; None with under three points."""
    points = [
        (np.log2(setting.batch_size), accuracy)
        for setting in middle_net(scores, family)
        for accuracy in scores[setting][method].values()
    ]
    if len(points) < 3 or len({x for x, _ in points}) < 2:
        return None
    return stats.linregress(*zip(*points))


def slopes_by_seed(scores: Scores, family: str, method: str) -> dict[int, float]:
    settings = middle_net(scores, family)
    seeds = set.intersection(*(set(scores[s][method]) for s in settings))
    sizes = [np.log2(s.batch_size) for s in settings]
    if len(set(sizes)) < 2:
        return {}
    return {
        seed: float(np.polyfit(sizes, [scores[s][method][seed] for s in settings], 1)[0]) for seed in sorted(seeds)
    }
