"""Make the wheel of a release: with the kernels, its bill of materials, a lock, and checksums beside it.

    python scripts/release.py dist [--extra sfm --extra app]

The lock is that of `lock.py`, the bill that of `bill_of_materials.py` with its hashes, both of the
environment in which this runs. The bill lies in the wheel's metadata, as `sboms/matcher.cdx.json`, where
PEP 770 wants it, and beside the wheel. `SHA256SUMS` holds the checksums of all three, as `sha256sum
--check` reads them. To install what was released and nothing else, on this platform and version of Python:

    cd dist && sha256sum --check SHA256SUMS
    pip install --require-hashes -r matcher.lock && pip install --no-deps matcher_vision-*.whl
"""

import argparse
import base64
import csv
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BILL, LOCK, SUMS = "matcher.cdx.json", "matcher.lock", "SHA256SUMS"


def recorded(record: bytes, name: str, data: bytes) -> bytes:
    """A wheel's list of its files with one more."""
    checksum = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    rows = [*csv.reader(io.StringIO(record.decode("utf-8"))), [name, f"sha256={checksum}", str(len(data))]]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8")


def add_bill(wheel: Path, bill: bytes) -> None:
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
                data = old.read(entry)
                if entry.filename == lists[0]:
                    data = recorded(data, name, bill)
                new.writestr(entry, data)
            new.writestr(name, bill)
    made.replace(wheel)


def main() -> int:
    """Build, add the bill, and write the checksums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go; none of them may be there")
    parser.add_argument("--extra", action="append", default=[], help="of the bill of materials")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if any(given.folder.glob("*.whl")) or any((given.folder / name).exists() for name in (BILL, LOCK, SUMS)):
        parser.error(f"{given.folder} holds a release already: name another folder")
    extras = [word for extra in given.extra for word in ("--extra", extra)]
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        place = Path(folder)
        for script, name, *more in (("lock", LOCK), ("bill_of_materials", BILL, "--lock", str(place / LOCK))):
            made = [sys.executable, str(ROOT / "scripts" / f"{script}.py"), str(place / name), *extras, *more]
            subprocess.run(made, check=True)
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(place), str(ROOT)]
        subprocess.run(pip, check=True)
        (wheel,) = place.glob("*.whl")
        add_bill(wheel, (place / BILL).read_bytes())
        files = (wheel, place / BILL, place / LOCK)
        sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
        for file in files:
            file.replace(given.folder / file.name)
    (given.folder / SUMS).write_text("".join(sums), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
