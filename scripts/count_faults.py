"""Run the tests of faults and write how many cases were tried and held into tests/README.md.

    python scripts/count_faults.py            # those of the suite: some minutes
    python scripts/count_faults.py --slow     # also the long ones: about two hours more
    python scripts/count_faults.py --short-cases a.json --long-cases b.json c.json    # of runs made apart

Such files are written by `pytest tests/faults --fault-cases FILE`, of the long tests by files of tests, with
`-m slow`. What the table says of the long tests of a promise stays as it was where none is run.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMISES, TABLE = ROOT / "SECURITY.md", ROOT / "tests" / "README.md"
BEGIN, END = "<!-- made by scripts/count_faults.py -->", "<!-- end -->"
HEAD = "| promise | in the suite | held | long tests | held |\n|---|---|---|---|---|"


def promises() -> dict[str, str]:
    """The bold beginning of each numbered promise."""
    return dict(re.findall(r"^(\d+)\. \*\*(.+?)\.\*\*", PROMISES.read_text("utf-8"), re.MULTILINE))


def count(*options: str) -> tuple[dict[str, list[int]], int]:
    """Cases tried and held by promise, and pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "cases.json"
        command = [sys.executable, "-m", "pytest", "tests/faults", f"--fault-cases={found}", *options]
        code = subprocess.run(command, cwd=ROOT).returncode
        return json.loads(found.read_text()), code


def added(paths: list[Path]) -> dict[str, list[int]]:
    """Cases tried and held by promise in the files of several runs."""
    found: dict[str, list[int]] = {}
    for path in paths:
        for number, (cases, held) in json.loads(path.read_text("utf-8")).items():
            before = found.get(number, [0, 0])
            found[number] = [before[0] + cases, before[1] + held]
    return found


def old_cells() -> dict[str, list[str]]:
    """The cells of the present table by promise."""
    table = TABLE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]  # not of other tables
    rows = re.findall(r"^\| (\d+)\..*?\|(.+)\|$", table, re.MULTILINE)
    return {number: [cell.strip() for cell in cells.split("|")] for number, cells in rows}


def main() -> int:
    """Count, write the table, and return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--slow", action="store_true", help="also run the long tests")
    parser.add_argument("--short-cases", type=Path, nargs="+", help="files of runs of the suite")
    parser.add_argument("--long-cases", type=Path, nargs="+", help="files of runs of the long tests")
    arguments = parser.parse_args()
    given = added(arguments.long_cases or []), 0
    short, code = (added(arguments.short_cases), 0) if arguments.short_cases else count()
    long, long_code = count("-m", "slow") if arguments.slow else given
    before, rows = old_cells(), [HEAD]
    for number, text in promises().items():
        cells = [f"{cases:,}" for cases in short.get(number, (0, 0))]
        if number in long:
            cells += [f"{cases:,}" for cases in long[number]]
        else:
            cells += before.get(number, ["", "", "–", "–"])[2:]
        rows.append(f"| {number}. {text} | " + " | ".join(cells) + " |")
    text = TABLE.read_text("utf-8")
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    TABLE.write_text(f"{text[:start]}\n" + "\n".join(rows) + f"\n{text[stop:]}", "utf-8")
    return code or long_code


if __name__ == "__main__":
    sys.exit(main())
