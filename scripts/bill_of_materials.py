"""Write the software bill of materials of a release: every package that `matcher` needs, with its licence.

    python scripts/bill_of_materials.py sbom.json [--extra sfm --extra app] [--lock matcher.lock]

The file is CycloneDX 1.5 (cyclonedx.org). Versions are those installed here; with a lock (`lock.py`)
packages are listed with the SHA-256 of their files, and the shipped weights always are. A table of packages
and licences goes to standard output.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = "matcher-vision"


def name_of(requirement: str) -> str:
    """The package that a requirement names, in lower case with dashes."""
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement)[0]).lower()


def direct(extras: list[str]) -> list[str]:
    """Packages that pyproject.toml names."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = project["optional-dependencies"]
    listed = [*project["dependencies"], *(row for extra in extras for row in optional[extra])]
    return [name_of(row) for row in listed]


def needed(names: list[str]) -> Iterator[Distribution]:
    """Those packages and all that they need, each once; optional parts of theirs are left out."""
    seen: set[str] = set()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # for another system or Python
        yield found
        names += [name_of(row) for row in found.requires or () if "extra ==" not in row]


def licence(found: Distribution) -> str:
    """What a package says of its licence, on one line."""
    meta = found.metadata
    said = meta.get("License-Expression") or meta.get("License") or ""
    classes = [row for row in meta.get_all("Classifier", []) if row.startswith("License ::")]
    if 0 < len(said) < 200:
        return said.strip().splitlines()[0][:80]
    return ", ".join(row.rpartition(" :: ")[2] for row in classes) or "see the package"


def weights() -> list[dict]:
    """The shipped files of the manifest."""
    from matcher.weights.files import read_manifest

    kind = "machine-learning-model"
    rows = read_manifest(ROOT / "weights").values()
    return [{"type": kind, "name": row.file, "hashes": [sha256(row.sha256)]} for row in rows]


def sha256(digest: str) -> dict[str, str]:
    """A hash as CycloneDX writes it."""
    return {"alg": "SHA-256", "content": digest}


def locked(text: str) -> dict[tuple[str, str], str]:
    """SHA-256 by name and version, of a lock that lock.py has made."""
    rows = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return {tuple(package.split("==")): digest.removeprefix("--hash=sha256:") for package, digest in rows}


def main() -> int:
    """Write the file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--extra", action="append", default=[])
    parser.add_argument("--lock", type=Path, help="of lock.py, in the same environment")
    given = parser.parse_args()
    hashes = locked(given.lock.read_text("utf-8")) if given.lock else {}
    found = sorted(needed(direct(given.extra)), key=lambda one: one.metadata["Name"].lower())
    rows = [(one.metadata["Name"], one.version, licence(one)) for one in found]
    components = [
        {"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name_of(name)}@{version}"}
        | {"licenses": [{"license": {"name": text}}]}
        | ({"hashes": [sha256(hashes[key])]} if (key := (name_of(name), version)) in hashes else {})
        for name, version, text in rows
    ]
    bill = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1}
    bill |= {"metadata": {"component": {"type": "application", "name": OURS}}}
    given.output.write_text(json.dumps({**bill, "components": components + weights()}, indent=1), "utf-8")
    for row in rows:
        print("{:32} {:16} {}".format(*row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
