"""Tutorials as programs: the blocks of a page, run from top to bottom.

`python` blocks share one namespace; of `sh` blocks `matcher` runs here and the rest in a shell; `console`
blocks are for the reader alone.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from matcher.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of the blocks that run."""
    return BLOCK.findall(page.read_text("utf-8"))


def prepare(folder: Path) -> Path:
    """A folder that looks like the checkout to a tutorial."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("assets", "weights", "scripts"):
        (folder / name).symlink_to(ROOT / name, target_is_directory=True)
    return folder


def environment() -> dict[str, str]:
    """One in which `matcher` and `python` are those of this process."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(found), "MPLBACKEND": "agg"}


def run_page(page: Path, folder: Path) -> None:
    """Run every block of a page in a folder; the first that fails raises with what it said."""
    namespace: dict[str, object] = {"__name__": "tutorial"}
    with contextlib.chdir(prepare(folder)):
        for language, text in blocks(page):
            if language == "python":
                exec(compile(text, page.name, "exec"), namespace)
                continue
            for line in text.replace("\\\n", " ").splitlines():
                if line.startswith("matcher "):  # in this process, which has all of it loaded
                    assert main(shlex.split(line)[1:]) == 0, line
                else:
                    subprocess.run(["bash", "-e", "-c", line], env=environment(), check=True)


def cells(page: Path) -> "NotebookNode":  # noqa: F821
    """A page as a notebook: its text, its Python, and its commands as `%%bash`."""
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    text, found, start = page.read_text("utf-8"), [], 0
    for block in BLOCK.finditer(text):
        found.append(("text", text[start : block.start()]))
        found.append((block[1], block[2]))
        start = block.end()
    found.append(("text", text[start:]))
    made = []
    for number, (kind, body) in enumerate(found):
        body = re.sub(r"^!\[.*\n", "", body, flags=re.MULTILINE).strip() if kind == "text" else body.strip()
        body = f"%%bash\n{body}" if kind == "sh" else body
        make = new_markdown_cell if kind == "text" else new_code_cell
        if body:
            made.append(make(body, id=f"{page.stem}-{number}"))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=made, metadata={"kernelspec": kernel})
