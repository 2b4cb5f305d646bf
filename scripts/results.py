"""Write every table of figures in the documents from the JSON files in docs/results.

    python scripts/results.py            # docs/results.md, and the tables of README.md and weights/README.md
    python scripts/results.py --check    # say whether they are up to date

A file holds a chapter of the page: `title`, `text` and `tables`; a table has a `name`, a `title`, `columns`,
`rows`, the `command` that measured it, the `code` and the `machine` that it was measured on, and a `note`.
In other documents a table stands between `<!-- table NAME -->` and `<!-- end -->`, with the columns and rows
that are given after its name: `<!-- table NAME columns 0,1,3 rows 0,2 -->`.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "results.md"
HEAD = """# Results

Written by `python scripts/results.py` from `docs/results/`. Named sets lie in the folder that `MATCHER_DATA`
names ([data](scripts.md#data)). Each table says which code it is of; the
[leaderboard](../weights/LEADERBOARD.md) has what was measured since. HPatches, MegaDepth-1500 and
ScanNet-1500 have not been measured; [your own benchmark](tutorials/benchmark.md) says how.
"""
MARK = re.compile(
    r"(<!-- table (\S+)(?: columns ([\d,]+))?(?: rows ([\d,]+))? -->\n).*?(<!-- end -->)", re.DOTALL
)


def chapters() -> list[dict]:
    """All chapters, in the order of their files."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("*.json"))]


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page() -> str:
    """The page of results."""
    parts = [HEAD]
    for chapter in chapters():
        parts.append(f"## {chapter['title']}\n")
        if chapter["text"]:
            parts.append(chapter["text"] + "\n")
        for table in chapter["tables"]:
            if table["title"]:
                parts.append(f"**{table['title']}**\n")
            parts.append(markdown(table["columns"], table["rows"]))
            origin = [
                f"`{table['command']}`" if table["command"] else "",
                table["machine"],
                table["code"],
                table["note"],
            ]
            parts.append("*" + "; ".join(part.rstrip(".") for part in origin if part) + ".*\n")
    return "\n".join(parts)


def filled(text: str) -> str:
    """A document with the tables between its marks written anew."""
    tables = {table["name"]: table for chapter in chapters() for table in chapter["tables"]}

    def chosen(found: re.Match) -> str:
        table = tables[found[2]]
        columns = [int(i) for i in found[3].split(",")] if found[3] else range(len(table["columns"]))
        rows = [int(i) for i in found[4].split(",")] if found[4] else range(len(table["rows"]))
        cells = [[table["rows"][row][column] for column in columns] for row in rows]
        return f"{found[1]}\n{markdown([table['columns'][i] for i in columns], cells)}\n{found[5]}"

    return MARK.sub(chosen, text)


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if something is out of date"
    )
    given = parser.parse_args()
    wanted = {PAGE: page()}
    for name in ("README.md", "weights/README.md"):
        wanted[ROOT / name] = filled((ROOT / name).read_text("utf-8"))
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
    if given.check:
        print("\n".join(f"{path.relative_to(ROOT)} is out of date" for path in stale) or "up to date")
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
