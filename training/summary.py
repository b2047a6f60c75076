"""All comparisons under model_cards/ in two Markdown tables: scores by task and variant, and what the gates did.

    python training/summary.py [model_cards]

Reads the `runs.jsonl` that `compare.py --report` publishes, and nothing else.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `training`, wherever this is started

from training.comparison import MEASURES, gate_means, histories, measure_of, rows_of
from training.records import read_records

SIGNIFICANT = 0.05


def main(folder: str = "model_cards") -> str:
    runs = {path.parent.name: read_records(path) for path in sorted(Path(folder).glob("*/runs.jsonl"))}
    runs = {name: records for name, records in runs.items() if records and "gate_history" in records[0]}
    if not runs:
        raise ValueError(f"There is no comparison under {folder}; see `compare.py --report`.")
    return "\n".join([*scores_table(runs), "", *gates_table(runs)])


def scores_table(runs: dict[str, list[dict]]) -> list[str]:
    variants = list(dict.fromkeys(record["variant"] for records in runs.values() for record in records))
    lines = [f"| task | {' | '.join(f'`{v}`' for v in variants)} |", "|---|" + "---:|" * len(variants)]
    for name, records in runs.items():
        measure = measure_of(records)
        rows = {row.variant: row for row in rows_of(records, measure)}
        arrow = "↑" if MEASURES[measure] else "↓"
        cells = [_cell(rows.get(variant), MEASURES[measure]) for variant in variants]
        lines.append(f"| {name}, {measure} {arrow} | {' | '.join(cells)} |")
    return lines


def _cell(row, more_is_better: bool) -> str:
    if row is None:
        return ""
    mark = ""
    if row.against is not None and not math.isnan(row.against.p) and row.against.p < SIGNIFICANT:
        mark = " better" if (row.against.mean > 0) == more_is_better else " worse"
    return f"{row.score.mean:.4f}{mark}"


def gates_table(runs: dict[str, list[dict]]) -> list[str]:
    lines = [
        "| task | variant | entropy, first and last epoch | norm weight, first and last third of layers |",
        "|---|---|---:|---:|",
    ]
    for name, records in runs.items():
        for variant, found in histories(records).items():
            first, last, early, late = gate_means(found)
            lines.append(f"| {name} | `{variant}` | {first:.3f}, {last:.3f} | {early:.3f}, {late:.3f} |")
    return lines


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
