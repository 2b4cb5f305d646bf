"""Stored results of `matcher evaluate`, and the leaderboard that is written from them.

    matcher evaluate kitchen --no-further-passes --threads 1 --output OUT
    python scripts/leaderboard.py collect OUT/*.json      # into docs/results/evaluate/SET.json
    python scripts/leaderboard.py write [--check]         # weights/LEADERBOARD.md, or whether it is current

docs/results/evaluate/SET.json is a list of rows, one a method, passes ("one" or "all") and number of pairs;
a new measurement replaces the old one. `figures` are the columns of the table of `matcher evaluate`: [value,
low, high], where low and high bound the 95 % interval (null for one pair); `ms` is wall-clock time, `CPU ms`
the processor's.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from matcher.benchmark import describe_machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results" / "evaluate"
BOARD = ROOT / "weights" / "LEADERBOARD.md"

# What was shipped or tried: how the rows are called, and what its training was.
RECIPES = {
    "hybrid-learned": ("`learned.toml`", "10 min of one H100, 151,312 pairs (the last run)"),
    "hybrid": ("`hybrid.toml`", "38 min of one core, 16,604 pairs (the last run)"),
    "nearest-learned": ("`learned.toml`, front end alone", "as `hybrid-learned`"),
    "nearest": ("SIFT, nothing trained", "–"),
}
# Sets of the board and the column of each.
SETS = {
    "kitchen": "AUC@10°",
    "kitchen_angles": "AUC@10°",
    "bookstore_rendered": "AUC@10°",
    "sensors": "AUC@5 px",
    "multimodal": "AUC@10 px",
    "oxford_graf": "AUC@10 px",
    "sceaux_castle": "AUC@5°",
    "kitti_mini": "AUC@5°",
}


def collect(paths: list[Path], commit: str) -> None:
    """Put the rows of tables into the files of their sets."""
    machine = describe_machine(torch.device("cpu"))
    for path in paths:
        table = json.loads(path.read_text())
        target = RESULTS / f"{table['set']}.json"
        stored = {key_of(row): row for row in (json.loads(target.read_text()) if target.is_file() else [])}
        for row in table["rows"]:
            figures = {
                title: [each and round(each, 4) for each in (value["value"], value["low"], value["high"])]
                for title, value in row["all"].items()
            }
            found = {
                "method": row["name"],
                "passes": "all" if row["several_passes"] else "one",
                "pairs": table["pairs"],
                "protocol": table["protocol"],
                "weights": row["weights"] and row["weights"]["sha256"][:12],
                "date": table["date"],
                "commit": commit,
                "command": re.sub(r" --(output \S+|overwrite)", "", table["command"]),
                "machine": f"{machine['processor']}, kernels {machine['kernels']}",
                "figures": figures,
            }
            stored[key_of(found)] = found
        rows = ",\n".join(json.dumps(stored[key], ensure_ascii=False) for key in sorted(stored))
        target.write_text(f"[\n{rows}\n]\n", encoding="utf-8")


def key_of(row: dict[str, Any]) -> tuple[str, str, int]:
    """What a new measurement replaces."""
    return row["method"], row["passes"], row["pairs"]


def board() -> str:
    """The leaderboard as Markdown."""
    found = {name: read_results(name) for name in SETS}
    titles = [f"`{name}` {column}" for name, column in SETS.items()]
    lines = [
        "# Leaderboard",
        "",
        "One row for each recipe of the shipped weights, and published implementations on the same pairs, "
        "written by `python scripts/leaderboard.py write` from `docs/results/evaluate/`, which has all "
        "figures, their intervals, commits and commands (`matcher evaluate SET`, with `--no-further-passes` "
        "for one pass). Rows called published are of their own code; those called ours have the same "
        "weights in this package, and refined matches. In brackets the number of pairs where it is not the "
        "whole set. CPU ms: median processor time of the whole call for a pair of the kitchen, one thread; "
        "the machine was shared, so compare only rows of one commit.",
        "",
        f"| method | passes | recipe | trained | {' | '.join(titles)} | CPU ms | commit, date |",
        f"|{' --- |' * (6 + len(titles))}",
    ]
    methods = {(row["method"], row["passes"]) for rows in found.values() for row in rows}
    order = list(RECIPES)
    for method, passes in sorted(
        methods, key=lambda key: (order.index(key[0]) if key[0] in order else 9, key)
    ):
        recipe, trained = RECIPES.get(method, ("published weights", "–"))
        best = {name: largest(rows, method, passes) for name, rows in found.items()}
        cells = [
            cell(row, column, found[name])
            for (name, column), row in zip(SETS.items(), best.values(), strict=True)
        ]
        made = sorted({f"{row['commit']}, {row['date']}" for row in best.values() if row})
        kitchen = best["kitchen"]
        ms = f"{kitchen['figures']['CPU ms'][0]:.0f}" if kitchen else "–"
        lines.append(f"| {' | '.join([method, passes, recipe, trained, *cells, ms, '; '.join(made)])} |")
    return "\n".join(lines) + "\n"


def read_results(name: str) -> list[dict[str, Any]]:
    """The stored rows of a set."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else []


def largest(rows: list[dict[str, Any]], method: str, passes: str) -> dict[str, Any] | None:
    """A method's row of the most pairs."""
    mine = [row for row in rows if key_of(row)[:2] == (method, passes)]
    return max(mine, key=lambda row: row["pairs"], default=None)


def cell(row: dict[str, Any] | None, column: str, rows: list[dict[str, Any]]) -> str:
    """A figure, with the number of pairs if others have more."""
    if row is None:
        return "–"
    text = f"{row['figures'][column][0]:.3f}".removeprefix("0")
    most = max(each["pairs"] for each in rows)
    return text if row["pairs"] == most else f"{text} ({row['pairs']})"


def main() -> int:
    """Collect results or write the board."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    given = kinds.add_parser("collect")
    given.add_argument("tables", nargs="+", type=Path, metavar="SET.json")
    given.add_argument("--commit", help="that was measured; by default the one that is checked out")
    kinds.add_parser("write").add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.kind == "write" and options.check:
        return int(BOARD.read_text(encoding="utf-8") != board())
    if options.kind == "write":
        BOARD.write_text(board(), encoding="utf-8")
        return 0
    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    collect(options.tables, options.commit or subprocess.check_output(head, text=True).strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
