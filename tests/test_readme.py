"""README.md: short, and true where a test can tell."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import PIL.Image
import pytest
import typer

from matcher.cli import build
from matcher.cli.machine import VARIABLES
from matcher.presets import DEFAULT_PRESET, PRESETS

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("matcher", "weights", "scripts", "tests")
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "measurements").glob("*.md"))
README = (ROOT / "README.md").read_text("utf-8")
DOCUMENTS = ["README.md", "SECURITY.md", *(f"{name}/README.md" for name in FOLDERS), *PAGES]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_it_is_short_and_names_the_default():
    assert len(README.splitlines()) <= 150
    assert f"**`{DEFAULT_PRESET}`**, the default" in README
    assert README.index("## Which preset") < README.index("AUC")


def test_every_snippet_runs(tmp_path):
    for name, source in (("a.jpg", "view0.jpg"), ("b.jpg", "view1.jpg")):
        view = PIL.Image.open(ROOT / "assets" / source)
        view.resize((view.width // 2, view.height // 2)).save(tmp_path / name)  # for speed
    (tmp_path / "photos").mkdir()
    for name in ("a.jpg", "b.jpg"):
        shutil.copy(tmp_path / name, tmp_path / "photos" / name)
    snippets = blocks("python")
    assert len(snippets) == 4
    # Worker processes import the main module again, so it has to be guarded.
    body = "\n".join(snippets).replace("\n", "\n    ")
    (tmp_path / "snippets.py").write_text(f"if __name__ == '__main__':\n    {body}\n", "utf-8")
    done = subprocess.run([sys.executable, "snippets.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"matches.npz", "matches.png", "run-nearest"} <= {path.name for path in tmp_path.iterdir()}


def commands() -> list[list[str]]:
    lines = [line.partition("#")[0] for block in blocks("sh") for line in block.splitlines()]
    evaluated = re.findall(r"\| `((?:synthetic|oxford|sceaux|kitti)[^`]*)` \|", README)
    found = [shlex.split(line) for line in lines if line.startswith("matcher ")]
    return found + [["matcher", "evaluate", *shlex.split(rest)] for rest in evaluated]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_is_understood(command):
    name, *arguments = command[1:]
    parser = typer.main.get_command(build()).commands[name]
    parser.make_context(name, arguments)  # raises for an unknown option or a wrong value


def test_every_preset_option_variable_and_file_named_exists():
    for name in re.findall(r"`([a-z]+(?:-[a-z]+)*-\*|hybrid[a-z-]*|nearest[a-z-]*)`", README):
        assert any(preset.startswith(name.rstrip("*")) for preset in PRESETS), name
    assert set(re.findall(r"\b(?:MATCHER_[A-Z_]+[A-Z]|OMP_NUM_THREADS)\b", README)) == set(VARIABLES)
    for script in re.findall(r"scripts/\w+\.py", README):
        assert (ROOT / script).is_file(), script


def test_every_page_of_measurements_is_linked_from_the_others():
    assert len(PAGES) > 10
    for document, base in (("measurements/README.md", ""), ("scripts/README.md", "../measurements/")):
        text = (ROOT / document).read_text("utf-8")
        missing = [page for page in PAGES if f"]({base}{Path(page).name})" not in text]
        assert [page for page in missing if page != document] == []


def anchors(path: Path) -> set[str]:
    """Those of a document's headings, as on GitHub."""
    titles = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    path = ROOT / document
    for target, anchor in re.findall(r"\]\(([^)#]+)(?:#([^)]*))?\)", path.read_text("utf-8")):
        assert target.startswith("http") or (path.parent / target).exists(), target
        assert not anchor or target.startswith("http") or anchor in anchors(path.parent / target), anchor


@pytest.mark.parametrize("document", ["scripts/README.md", *PAGES])
def test_every_script_and_test_named_by_a_measurement_exists(document):
    text = (ROOT / document).read_text("utf-8")
    for file in re.findall(r"\b(?:scripts|tests)/\w+\.(?:py|md)", text):
        assert (ROOT / file).is_file(), file
    for command in re.findall(r"\bmatcher ([a-z]+) ", " ".join(re.findall(r"`([^`]*)`", text))):
        assert command in typer.main.get_command(build()).commands, command
