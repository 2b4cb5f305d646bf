"""Build the site in build/site, strictly: a broken link or a name that does not exist fails.

    python3 scripts/docs.py               # in an environment of its own, with the extra [docs]
    python3 scripts/docs.py --words       # count the words of all documents, build nothing
    python3 scripts/docs.py --pictures    # run the tutorials and keep the pictures that they show
    python3 scripts/docs.py --notebooks   # write docs/notebooks from the tutorials, and run them

The pages are docs/, the documents at the top of the repository, the model card, the map of the code, and the
reference of the commands, which is read from the commands themselves. Links work here and there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS, BUILD = ROOT / "docs", ROOT / "build"
MOST_WORDS = 14_000
# Documents outside docs/ that are pages too.
PAGES = {
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "weights/README.md": "model-card.md",
    "weights/LEADERBOARD.md": "leaderboard.md",
    "matcher/README.md": "map.md",
}
NOTEBOOKS = ("two-photos", "where", "video", "benchmark")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def documents() -> list[Path]:
    """All Markdown of the project."""
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [path for path in map(ROOT.joinpath, found.stdout.splitlines()) if path.is_file()]


def words(text: str) -> int:
    """Pieces between spaces that hold a letter or a digit."""
    return len(re.findall(r"\S*\w\S*", text))


def relinked(text: str, source: Path, page: str) -> str:
    """A document with its links as they are from a page; files that are no pages become code."""
    known = {ROOT / name: place for name, place in PAGES.items()}

    def link(found: re.Match) -> str:
        picture, label, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        name, _, anchor = target.partition("#")
        path = Path(os.path.normpath(source.parent / name))
        if path in known:
            place = known[path]
        elif path.is_relative_to(DOCS):
            place = path.relative_to(DOCS).as_posix()
        elif not path.exists():
            raise SystemExit(f"{source.relative_to(ROOT)} links to {target}, which does not exist")
        else:
            return f"`{path.relative_to(ROOT)}`" if not picture else label
        near = os.path.relpath(place, Path(page).parent)
        return f"{picture}[{label}]({near}{'#' * bool(anchor)}{anchor})"

    return LINK.sub(link, text)


def command_reference() -> str:
    """Every command with its arguments and options, as `--help` has them."""
    import typer

    from matcher.cli import build

    lines = ["# Commands\n", "Read from the commands themselves; `matcher COMMAND --help` says the same.\n"]

    def describe(name: str, command) -> None:
        lines.append(f"## {name}\n")
        lines.append(re.sub(r"\s*\n\s*\n\s*", "\n\n", (command.help or "").strip()).replace("\b", "") + "\n")
        for nested, one in getattr(command, "commands", {}).items():
            describe(f"{name} {nested}", one)
        if getattr(command, "commands", None):
            return
        context = typer.Context(command, info_name=f"matcher {name}")
        usage = command.get_usage(context).removeprefix("Usage: ")
        lines.append(f"```text\n{re.sub('[{}]', '', usage).replace('......', '...')}\n```\n")
        for option in command.params:
            row = option.get_help_record(context)
            if row and option.name != "help":
                left = re.sub(r" <(path|list\[Path\])>", "", row[0].strip())
                said = " ".join(row[1].split()).replace("[", "\\[").replace("<", "&lt;")
                lines.append(f"`{left}`\n:   {said or '–'}\n")

    for name, command in typer.main.get_command(build()).commands.items():
        describe(name, command)
    return "\n".join(lines)


def gather() -> Path:
    """The folder of pages that mkdocs reads."""
    place = BUILD / "pages"
    shutil.rmtree(place, ignore_errors=True)
    left_out = shutil.ignore_patterns("mkdocs.yml", "doctests.py", "hooks.py", "results", "notebooks")
    shutil.copytree(DOCS, place, ignore=left_out)
    sources = {
        DOCS / path.relative_to(place): path.relative_to(place).as_posix() for path in place.rglob("*.md")
    }
    for source, page in (sources | {ROOT / name: page for name, page in PAGES.items()}).items():
        (place / page).write_text(relinked(source.read_text("utf-8"), source, page), "utf-8")
    (place / "reference" / "commands.md").write_text(command_reference(), "utf-8")
    return place


def build() -> int:
    """The site; the exit code of mkdocs."""
    gather()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(
        [*command, "--config-file", str(DOCS / "mkdocs.yml"), "--site-dir", str(BUILD / "site")],
        cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        print(f"built {BUILD / 'site'}")
    return done.returncode


def pictures() -> None:
    """Run the tutorials and keep what `![…](../pictures/TUTORIAL/FILE)` shows, at most 1,000 pixels wide."""
    from PIL import Image
    from tutorials import PAGES as tutorials
    from tutorials import run_page

    for page in tutorials:
        wanted = re.findall(rf"\(\.\./pictures/{page.stem}/([^)]+)\)", page.read_text("utf-8"))
        if not wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            run_page(page, Path(folder) / "work")
            for name in wanted:
                place = DOCS / "pictures" / page.stem / name
                place.parent.mkdir(parents=True, exist_ok=True)
                picture = Image.open(Path(folder) / "work" / name).convert("RGB")
                picture.thumbnail((1000, 1000))
                if place.suffix == ".png":
                    picture = picture.quantize(96)
                picture.save(place, quality=80, optimize=True)
                print(place.relative_to(ROOT), place.stat().st_size)


def notebooks() -> None:
    """Four tutorials as notebooks, run, with what they print."""
    import nbformat
    from nbclient import NotebookClient
    from tutorials import cells, environment, prepare

    os.environ.update(environment())
    for name in NOTEBOOKS:
        notebook = cells(DOCS / "tutorials" / f"{name}.md")
        with tempfile.TemporaryDirectory() as folder:
            place = prepare(Path(folder) / "work")
            NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(place)}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":  # what was printed, as one piece, without progress
                said = "".join(one.text for one in cell.outputs if one.get("name") == "stdout")
                said = said.replace(f"{place}/", "")
                cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=said)] if said else []
        (DOCS / "notebooks").mkdir(exist_ok=True)
        nbformat.write(notebook, DOCS / "notebooks" / f"{name}.ipynb")


def main() -> int:
    """Do what is asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("words", "pictures", "notebooks", "here"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.words:
        counts = {path.relative_to(ROOT): words(path.read_text("utf-8")) for path in documents()}
        for path, count in counts.items():
            print(f"{count:6} {path}")
        print(f"{sum(counts.values()):6} in all, of at most {MOST_WORDS}")
        return int(sum(counts.values()) > MOST_WORDS)
    if not given.here:
        from environment import prepare

        return subprocess.run([prepare(("docs",)), __file__, "--here", *sys.argv[1:]], check=False).returncode
    sys.path.insert(0, str(ROOT / "tests"))  # whose `tutorials` runs the pages
    if given.pictures:
        pictures()
    elif given.notebooks:
        notebooks()
    else:
        return build()
    return 0


if __name__ == "__main__":
    sys.exit(main())
