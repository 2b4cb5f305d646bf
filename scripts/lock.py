"""Write the lock of an installation: all packages that `matcher` needs, with the SHA-256 of their files.

    python scripts/lock.py matcher.lock [--extra sfm --extra app]
    pip install --require-hashes -r matcher.lock

Versions are those installed here, which the tests have run with; pip says which file of each it would
install, and the hash that the index states. These are files for this platform and this version of Python:
elsewhere pip refuses them, and a lock has to be made there.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from bill_of_materials import direct, name_of, needed


class Locked(NamedTuple):
    """One package as pip would install it."""

    name: str
    version: str
    sha256: str


def resolve(versions: dict[str, str]) -> list[Locked]:
    """What pip would install of packages at these versions, and nothing else.

    Raises:
        SystemExit: the index has not all of them, or states no SHA-256 of one.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "-qq"]
        asked = [f"{name}=={version}" for name, version in versions.items()]
        if subprocess.run([*pip, "--report", str(report), *asked]).returncode:
            raise SystemExit(
                "pip does not find all packages at the versions that are installed here: see above"
            )
        rows = json.loads(report.read_text("utf-8"))["install"]
    found = []
    for row in rows:
        name, file = name_of(row["metadata"]["name"]), row["download_info"].get("archive_info", {})
        hashes = file.get("hashes") or dict([file.get("hash", "").partition("=")[::2]])  # before pip 23.1
        digest = hashes.get("sha256")
        if digest is None:
            raise SystemExit(f"the index states no SHA-256 of {name}")
        found.append(Locked(name, row["metadata"]["version"], digest))
    return sorted(found)


def written(found: list[Locked]) -> str:
    """A file of requirements with hashes, as pip reads it."""
    where = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    lines = [f"# Made by scripts/lock.py on {where}; the hashes are of the files for it."]
    lines += [f"{one.name}=={one.version} --hash=sha256:{one.sha256}" for one in found]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the lock."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--extra", action="append", default=[])
    given = parser.parse_args()
    here = {name_of(one.metadata["Name"]): one.version for one in needed(direct(given.extra))}
    given.output.write_text(written(resolve(here)), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
