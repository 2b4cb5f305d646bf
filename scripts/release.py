"""Make the files of a release: wheels with kernels and without, the sdist, a lock, and checksums beside them.

    python scripts/release.py dist [--extra sfm --extra app] [--lock-only] [--try]

`matcher.lock` has every package that `matcher` needs at the version installed here, which the tests have run
with, and the SHA-256 that the index states for the file that pip would install on this platform and version
of Python. `matcher.cdx.json` is the bill of materials (CycloneDX 1.5, cyclonedx.org): these packages with
licences and hashes, and the shipped weights; in the wheel's metadata it is `sboms/matcher.cdx.json`, where
PEP 770 wants it. `SHA256SUMS` holds the checksums of all. pip takes the wheel with kernels where it fits the
machine, for any Python from 3.11 on, else the other. `--try` installs each wheel and the sdist into an
environment of its own and matches two images. To install what was released and nothing else:

    cd dist && sha256sum --check SHA256SUMS
    pip install --require-hashes -r matcher.lock
    pip install --no-deps --no-index --find-links . matcher-vision
"""

import argparse
import base64
import csv
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BILL, LOCK, SUMS = "matcher.cdx.json", "matcher.lock", "SHA256SUMS"


def name_of(requirement: str) -> str:
    """The package that a requirement names, in lower case with dashes."""
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement)[0]).lower()


def needed(extras: list[str]) -> Iterator[Distribution]:
    """The packages that pyproject.toml names and all that they need, without optional parts of theirs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = [row for extra in extras for row in project["optional-dependencies"][extra]]
    names, seen = [name_of(row) for row in (*project["dependencies"], *optional)], set()
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
    if 0 < len(said) < 200:
        return said.strip().splitlines()[0][:80]
    classes = [row for row in meta.get_all("Classifier", []) if row.startswith("License ::")]
    return ", ".join(row.rpartition(" :: ")[2] for row in classes) or "see the package"


def resolve(versions: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Version and SHA-256 by name of what pip would install of packages at these versions.

    Raises:
        SystemExit: the index has not all of them, or states no SHA-256 of one.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "-qq"]
        asked = [f"{name}=={version}" for name, version in versions.items()]
        if subprocess.run([*pip, "--report", str(report), *asked]).returncode:
            raise SystemExit("pip does not find all packages at the versions that are installed here")
        rows = json.loads(report.read_text("utf-8"))["install"]
    found = {}
    for row in rows:
        name, file = name_of(row["metadata"]["name"]), row["download_info"].get("archive_info", {})
        hashes = file.get("hashes") or dict([file.get("hash", "").partition("=")[::2]])  # before pip 23.1
        if "sha256" not in hashes:
            raise SystemExit(f"the index states no SHA-256 of {name}")
        found[name] = (row["metadata"]["version"], hashes["sha256"])
    return dict(sorted(found.items()))


def lock(found: dict[str, tuple[str, str]]) -> str:
    """A file of requirements with hashes, as pip reads it."""
    where = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    lines = [f"# Made by scripts/release.py on {where}; the hashes are of the files for it."]
    return (
        "\n".join(lines + [f"{name}=={v} --hash=sha256:{digest}" for name, (v, digest) in found.items()])
        + "\n"
    )


def bill(packages: list[Distribution], hashes: dict[str, tuple[str, str]]) -> dict:
    """CycloneDX of packages, with the hashes of `resolve` where it has them, and of the shipped weights."""
    from matcher.weights.files import read_manifest

    components = []
    for one in sorted(packages, key=lambda one: one.metadata["Name"].lower()):
        name = name_of(one.metadata["Name"])
        row = {"type": "library", "name": one.metadata["Name"], "version": one.version}
        row |= {"purl": f"pkg:pypi/{name}@{one.version}", "licenses": [{"license": {"name": licence(one)}}]}
        version, digest = hashes.get(name, ("", ""))
        components.append(row | ({"hashes": [sha256(digest)]} if version == one.version else {}))
    for row in read_manifest(ROOT / "weights").values():
        kind = "machine-learning-model"
        components.append({"type": kind, "name": row.file, "hashes": [sha256(row.sha256)]})
    made_of = {"component": {"type": "application", "name": "matcher-vision"}}
    head = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": made_of}
    return {**head, "components": components}


def sha256(digest: str) -> dict[str, str]:
    """A hash as CycloneDX writes it."""
    return {"alg": "SHA-256", "content": digest}


def recorded(record: bytes, name: str, data: bytes) -> bytes:
    """A wheel's list of its files with one more."""
    checksum = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    rows = [*csv.reader(io.StringIO(record.decode("utf-8"))), [name, f"sha256={checksum}", str(len(data))]]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8")


def add_bill(wheel: Path, data: bytes) -> None:
    """Put a bill of materials into a wheel, which is replaced as a whole.

    Raises:
        SystemExit: the file is no wheel, or holds a bill already.
    """
    with zipfile.ZipFile(wheel) as old:
        names = old.namelist()
        lists = [name for name in names if name.count("/") == 1 and name.endswith(".dist-info/RECORD")]
        if len(lists) != 1:
            raise SystemExit(f"{wheel} is no wheel: it has no list of its files")
        name = f"{lists[0].partition('/')[0]}/sboms/{BILL}"
        if name in names:
            raise SystemExit(f"{wheel} holds a bill of materials already")
        made = wheel.with_name(f".{wheel.name}.new")
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
            for entry in old.infolist():
                kept = old.read(entry)
                new.writestr(entry, recorded(kept, name, data) if entry.filename == lists[0] else kept)
            new.writestr(name, data)
    made.replace(wheel)


def built(folder: Path) -> list[Path]:
    """The wheels with kernels and without, and the sdist, made in a folder."""
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    for compiled in ("1", "0"):
        environment = {name: value for name, value in os.environ.items() if name != "MATCHER_COMPILED"}
        subprocess.run(
            pip, env=environment | ({} if compiled == "1" else {"MATCHER_COMPILED": "0"}), check=True
        )
    python = environment_of(folder / "tools")
    subprocess.run([python, "-m", "pip", "install", "-q", "hatchling>=1.24"], check=True)
    subprocess.run([python, "-m", "hatchling", "build", "-t", "sdist", "-d", folder], cwd=ROOT, check=True)
    return [*sorted(folder.glob("*.whl")), *folder.glob("*.tar.gz")]


def environment_of(folder: Path) -> Path:
    """The Python of a new environment."""
    venv.create(folder, with_pip=True)
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def tried(files: list[Path]) -> None:
    """Install each file into an environment of its own, and match two images there.

    Raises:
        CalledProcessError: one of them cannot be installed, or does not match.
    """
    views = [str(ROOT / "assets" / name) for name in ("view0.jpg", "view1.jpg")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for file in files:
        with tempfile.TemporaryDirectory() as folder:
            python = environment_of(Path(folder) / "environment")
            environment["MATCHER_CACHE"] = str(Path(folder) / "cache")  # no kernels compiled before
            constraint = ["--constraint", str(ROOT / "constraints.txt")]
            subprocess.run(
                [python, "-m", "pip", "install", "-q", *constraint, str(file)], env=environment, check=True
            )
            size = sum(path.lstat().st_size for path in Path(folder).rglob("*") if not path.is_symlink())
            match = [python, "-m", "matcher", "match", *views, "--max-keypoints", "512", "--fail-below", ".9"]
            subprocess.run(match, cwd=folder, env=environment, check=True)
            done = subprocess.run(
                [python, "-m", "matcher", "env"], cwd=folder, env=environment, capture_output=True, text=True
            )
            kernels = next((line for line in done.stdout.splitlines() if "kernels" in line), "")
            print(f"{file.name}: {size / 1e6:.0f} MB installed; {kernels}", flush=True)


def main() -> int:
    """Build, add the bill, and write the checksums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go; none of them may be there")
    parser.add_argument("--extra", action="append", default=[], help="optional dependencies to include")
    parser.add_argument("--lock-only", action="store_true", help="for an installation of one's own")
    parser.add_argument("--try", dest="attempt", action="store_true", help="install and run what was made")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if any(given.folder.glob("*.whl")) or any((given.folder / name).exists() for name in (BILL, LOCK, SUMS)):
        parser.error(f"{given.folder} holds a release already: name another folder")
    packages = list(needed(given.extra))
    hashes = resolve({name_of(one.metadata["Name"]): one.version for one in packages})
    if given.lock_only:
        (given.folder / LOCK).write_text(lock(hashes), "utf-8")
        return 0
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        place = Path(folder)
        files = built(place)
        (place / LOCK).write_text(lock(hashes), "utf-8")
        (place / BILL).write_text(json.dumps(bill(packages, hashes), indent=1), "utf-8")
        for file in files:
            if file.suffix == ".whl":
                add_bill(file, (place / BILL).read_bytes())
        if given.attempt:
            tried(files)
        files = [*files, place / BILL, place / LOCK]
        sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
        for file in files:
            file.replace(given.folder / file.name)
    (given.folder / SUMS).write_text("".join(sums), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
