"""Write every table of figures in the documents from the JSON files in docs/results.

    python scripts/results.py            # docs/results.md, the leaderboard, and the tables of other documents
    python scripts/results.py --check    # say whether they are up to date
    matcher evaluate kitchen --no-further-passes --threads 1 --output OUT
    python scripts/results.py --collect OUT/*.json   # into docs/results/evaluate/SET.json

A file of docs/results holds a chapter of the page: `title`, `text` and `tables`; a table has a `name`, a
`title`, `columns`, `rows`, the `command` that measured it, the `code` and the `machine` that it was measured
on, and a `note`. In other documents a table stands between `<!-- table NAME -->` and `<!-- end -->`, with the
columns and rows that are given after its name: `<!-- table NAME columns 0,1,3 rows 0,2 -->`.

docs/results/evaluate/SET.json is a list of rows of the leaderboard, one a method, passes ("one" or "all") and
number of pairs; a new measurement replaces the old one. `figures` are the columns of the table of `matcher
evaluate`: [value, low, high], where low and high bound the 95 % interval (null for one pair); `ms` is
wall-clock time, `CPU ms` the processor's.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
HEAD = """# Results

Written by `python scripts/results.py` from `docs/results/`. Named sets lie in the folder that `MATCHER_DATA`
names ([data](scripts.md#data)). Each table says which code it is of; the
[leaderboard](../weights/LEADERBOARD.md) has what was measured since. HPatches, MegaDepth-1500 and
ScanNet-1500 have not been measured; [your own benchmark](tutorials/benchmark.md) says how.
"""
BOARD = """# Leaderboard

One row for each recipe of the shipped weights, and published implementations on the same pairs, written by
`python scripts/results.py` from `docs/results/evaluate/`, which has all figures, their intervals, commits and
commands (`matcher evaluate SET`, with `--no-further-passes` for one pass). Rows called published are of their
own code; those called ours have the same weights in this package, and refined matches. In brackets the number
of pairs where it is not the whole set. CPU ms: median processor time of the whole call for a pair of the
kitchen, one thread; the machine was shared, so compare only rows of one commit.
"""
MARK = re.compile(
    r"(<!-- table (\S+)(?: columns ([\d,]+))?(?: rows ([\d,]+))? -->\n).*?(<!-- end -->)", re.DOTALL
)
# What was shipped or tried: how the rows of the leaderboard are called, and what its training was.
RECIPES = {
    "hybrid-learned": ("`learned.toml`", "10 min of one H100, 151,312 pairs (the last run)"),
    "hybrid": ("`hybrid.toml`", "38 min of one core, 16,604 pairs (the last run)"),
    "nearest-learned": ("`learned.toml`, front end alone", "as `hybrid-learned`"),
    "nearest": ("SIFT, nothing trained", "–"),
}
# Sets of the leaderboard and the column of each.
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


def read(path: Path) -> Any:
    """The values of a JSON file; an empty list without one."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else []


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(chapters: list[dict]) -> str:
    """The page of results."""
    parts = [HEAD]
    for chapter in chapters:
        parts.append(f"## {chapter['title']}\n")
        if chapter["text"]:
            parts.append(chapter["text"] + "\n")
        for table in chapter["tables"]:
            if table["title"]:
                parts.append(f"**{table['title']}**\n")
            parts.append(markdown(table["columns"], table["rows"]))
            command = table["command"]
            if command and "`" not in command:  # else words stand between commands
                command = f"`{command}`"
            origin = [command, table["machine"], table["code"], table["note"]]
            parts.append("*" + "; ".join(part.rstrip(".") for part in origin if part) + ".*\n")
    return "\n".join(parts)


def filled(text: str, chapters: list[dict]) -> str:
    """A document with the tables between its marks written anew."""
    tables = {table["name"]: table for chapter in chapters for table in chapter["tables"]}

    def chosen(found: re.Match) -> str:
        table = tables[found[2]]
        columns = [int(i) for i in found[3].split(",")] if found[3] else range(len(table["columns"]))
        rows = [int(i) for i in found[4].split(",")] if found[4] else range(len(table["rows"]))
        cells = [[table["rows"][row][column] for column in columns] for row in rows]
        return f"{found[1]}\n{markdown([table['columns'][i] for i in columns], cells)}\n{found[5]}"

    return MARK.sub(chosen, text)


def key_of(row: dict[str, Any]) -> tuple[str, str, int]:
    """What a new measurement replaces."""
    return row["method"], row["passes"], row["pairs"]


def collect(paths: list[Path], commit: str) -> None:
    """Put the rows of tables into the files of their sets."""
    import torch
    from benchmark import describe_machine

    machine = describe_machine(torch.device("cpu"))
    for path in paths:
        table = read(path)
        target = RESULTS / "evaluate" / f"{table['set']}.json"
        stored = {key_of(row): row for row in read(target)}
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


def board() -> str:
    """The leaderboard as Markdown; of a method the row of the most pairs."""
    found = {name: read(RESULTS / "evaluate" / f"{name}.json") for name in SETS}
    order, rows = list(RECIPES), []
    methods = {(row["method"], row["passes"]) for stored in found.values() for row in stored}
    for key in sorted(methods, key=lambda key: (order.index(key[0]) if key[0] in order else 9, key)):
        best = {
            name: max((r for r in stored if key_of(r)[:2] == key), key=lambda r: r["pairs"], default=None)
            for name, stored in found.items()
        }
        cells = [cell(best[name], column, found[name]) for name, column in SETS.items()]
        made = sorted({f"{row['commit']}, {row['date']}" for row in best.values() if row})
        kitchen = best["kitchen"]
        ms = f"{kitchen['figures']['CPU ms'][0]:.0f}" if kitchen else "–"
        rows.append([*key, *RECIPES.get(key[0], ("published weights", "–")), *cells, ms, "; ".join(made)])
    titles = [f"`{name}` {column}" for name, column in SETS.items()]
    head = ["method", "passes", "recipe", "trained", *titles, "CPU ms", "commit, date"]
    return f"{BOARD}\n{markdown(head, rows)}"


def cell(row: dict[str, Any] | None, column: str, rows: list[dict[str, Any]]) -> str:
    """A figure, with the number of pairs if others have more."""
    if row is None:
        return "–"
    text = f"{row['figures'][column][0]:.3f}".removeprefix("0")
    most = max(each["pairs"] for each in rows)
    return text if row["pairs"] == most else f"{text} ({row['pairs']})"


def main() -> int:
    """Write, check or collect."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if out of date")
    parser.add_argument("--collect", nargs="+", type=Path, metavar="SET.json", help="of `matcher evaluate`")
    parser.add_argument("--commit", help="that was measured; by default the one that is checked out")
    given = parser.parse_args()
    if given.collect:
        head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        collect(given.collect, given.commit or subprocess.check_output(head, text=True).strip())
    chapters = [read(path) for path in sorted(RESULTS.glob("*.json"))]
    wanted = {ROOT / "docs" / "results.md": page(chapters), ROOT / "weights" / "LEADERBOARD.md": board()}
    for name in ("README.md", "weights/README.md"):
        wanted[ROOT / name] = filled((ROOT / name).read_text("utf-8"), chapters)
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
    if given.check:
        print("\n".join(f"{path.relative_to(ROOT)} is out of date" for path in stale) or "up to date")
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
