"""The documents: short, with links that lead somewhere, commands that work, and figures from results."""

import doctest
import functools
import importlib.util
import os
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import PIL.Image
import pytest
import tutorials
import typer

import matcher
from matcher.cli import build
from matcher.cli.machine import VARIABLES
from matcher.presets import DEFAULT_PRESET, PRESETS

pytestmark = pytest.mark.usefixtures("compiled")

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
MOST_WORDS = {
    "README.md": 700,
    "CHANGELOG.md": 600,
    "SECURITY.md": 500,
    "CONTRIBUTING.md": 400,
    "weights/README.md": 900,
    "matcher/README.md": 1400,
}
FOLDERS = ("docs", "matcher", "weights", "scripts", "tests", "assets")
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))]
)


def text(document: str) -> str:
    return (ROOT / document).read_text("utf-8")


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text(document), re.MULTILINE | re.DOTALL)


def words(source: str) -> int:
    """Pieces between spaces that hold a letter or a digit, as `scripts/docs.py --words` counts them."""
    return len(re.findall(r"\S*\w\S*", source))


def test_documents_are_short():
    for document, most in MOST_WORDS.items():
        assert words(text(document)) <= most, document
    assert sum(words(text(document)) for document in DOCUMENTS) <= 14_000


def test_the_readme_begins_with_two_commands():
    commands = blocks("README.md", "sh")[0].splitlines()
    assert [line.split("#")[0].split() for line in commands] == [
        ["python3", "scripts/demo.py"],
        ["python3", "scripts/run_tests.py"],
    ]


@pytest.mark.parametrize("document", ["README.md", "docs/coming-from.md", "docs/questions.md"])
def test_python_in_a_document_runs(document, tmp_path, shipped_weights, monkeypatch):
    for name, source in (("a.jpg", "view0.jpg"), ("b.jpg", "view1.jpg")):
        view = PIL.Image.open(ROOT / "assets" / source)
        view.resize((view.width // 2, view.height // 2)).save(tmp_path / name)  # for speed
    snippets = [block for block in blocks(document, "python") if block.startswith("import")]
    assert snippets
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(snippets), document, "exec"), {"__name__": "snippets"})


@functools.cache
def everything_typed() -> typer.core.TyperGroup:
    return typer.main.get_command(build())


def parser(words: list[str]) -> tuple[typer.core.TyperGroup, list[str]]:
    """The command that words begin with, and the other words."""
    command = everything_typed()
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def shown() -> list[str]:
    """The commands in blocks, and those in the tables of README."""
    found = []
    for document in DOCUMENTS:
        for language in ("sh", "console"):
            lines = [
                line
                for block in blocks(document, language)
                for line in block.replace("\\\n", " ").splitlines()
            ]
            found += [line.partition("#")[0].strip() for line in lines]
    found += re.findall(r"\| `(matcher [^`]+)` \|", README)
    return sorted({line for line in found if line.startswith("matcher ")})


@pytest.mark.parametrize("line", shown())
def test_a_command_is_understood(line):
    command, arguments = parser(shlex.split(line)[1:])
    command.make_context("matcher", arguments)  # raises for an unknown option or a wrong value


def test_commands_and_options_mentioned_exist():
    for document in set(DOCUMENTS) - {"matcher/README.md"}:
        for line in re.findall(r"`matcher ([a-z][^`]*)`", text(document)):
            command, arguments = parser(re.sub(r"[,;].*", "", line).split())
            options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
            used = {word for word in arguments if word.startswith("--")} - {"--help"}
            assert used <= options, f"{document}: {line}"


def test_every_preset_variable_and_script_named_exists():
    everything = "\n".join(map(text, DOCUMENTS))
    assert f"`{DEFAULT_PRESET}`" in README + text("docs/presets.md")
    for name in re.findall(
        r"`((?:hybrid|nearest|superglue|lightglue|loftr)(?:-[a-z]+)*(?:-\*)?)`", everything
    ):
        assert any(preset.startswith(name.rstrip("*")) for preset in PRESETS), name
    variables = r"\b(?:MATCHER_[A-Z_]+[A-Z]|OMP_NUM_THREADS)\b"
    assert set(re.findall(variables, text("docs/installing.md"))) == set(VARIABLES)
    for script in re.findall(r"\b(?:scripts|tests)/[\w/]+\.(?:py|cpp)", everything):
        assert (ROOT / script).is_file(), script


def anchors(path: Path) -> set[str]:
    """Those of a document's headings, as on GitHub."""
    titles = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere_and_pictures_are_small(document):
    path = ROOT / document
    for target, anchor in re.findall(r"\]\(([^)#]+)(?:#([^)]*))?\)", text(document)):
        if target.startswith("http") or target == "reference/commands.md":  # which scripts/docs.py writes
            continue
        assert (path.parent / target).exists(), target
        if path in tutorials.PAGES and target.endswith((".png", ".jpg", ".svg")):
            assert (picture := (path.parent / target).resolve()).is_relative_to(ROOT / "docs" / "pictures")
            assert picture.stat().st_size < 200_000
        assert not anchor or anchor in anchors(path.parent / target), anchor


def test_the_manifest_of_the_weights_gives_figures_of_the_results():
    figures = set(re.findall(r"(?<![\d.])\.\d{3}\b", text("docs/results.md")))
    for row in tomllib.loads(text("weights/manifest.toml"))["weights"]:
        given = set(re.findall(r"(?<![\d.])\.\d{3}\b", row["metrics"]))
        assert len(given) > 5
        assert given <= figures, given - figures


def test_the_version_is_the_same_everywhere():
    versions = {
        matcher.__version__,
        tomllib.loads(text("pyproject.toml"))["project"]["version"],
        tomllib.loads(text("scripts/lite/pyproject.toml"))["project"]["version"],
        re.search(r"^version: (\S+)$", text("CITATION.cff"), re.MULTILINE)[1],
        re.search(r"^## (\d\S*)$", text("CHANGELOG.md"), re.MULTILINE)[1],
    }
    assert len(versions) == 1


# --- Every public name has an example that works.


# Exceptions and constants.
WITHOUT_EXAMPLE = {
    "PRESETS",
    "__version__",
    *(name for name in matcher.__all__ if name.endswith(("Error", "Warning"))),
}


@pytest.mark.parametrize("name", sorted(set(matcher.__all__) - WITHOUT_EXAMPLE))
def test_the_example_of_a_public_name_works(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    thing = getattr(matcher, name)
    known = {"matcher": matcher, name: thing}
    found = doctest.DocTestFinder(exclude_empty=True).find(thing, name, globs=known)
    examples = [test for test in found if test.examples]
    assert any(test.name == name for test in examples), f"matcher.{name} has no example in its docstring"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in examples:
        output = []
        runner.run(test, out=output.append)
        assert runner.failures == 0, "".join(output)


# --- The tutorials run from top to bottom, four of them as notebooks.


def notebook(page: Path) -> Path:
    return ROOT / "docs" / "notebooks" / f"{page.stem}.ipynb"


LONG = ("splat", "where")  # tutorials that take ten seconds


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in LONG else [])
        for page in tutorials.PAGES
    ],
)
def test_a_tutorial_runs_from_top_to_bottom(page, tmp_path, shipped_weights, monkeypatch):
    if page.stem in ("splat", "where"):
        pytest.importorskip("pycolmap")
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    assert len(tutorials.blocks(page)) >= 2
    if not (notebook(page).is_file() and all(map(importlib.util.find_spec, ("nbclient", "ipykernel")))):
        tutorials.run_page(page, tmp_path / "work")
        return
    import nbformat
    from nbclient import NotebookClient

    for name, value in tutorials.environment().items():
        monkeypatch.setitem(os.environ, name, value)
    found = nbformat.read(notebook(page), as_version=4)
    resources = {"metadata": {"path": str(tutorials.prepare(tmp_path / "work"))}}
    NotebookClient(found, timeout=900, resources=resources).execute()  # raises if a cell does


@pytest.mark.parametrize(
    "page", [page for page in tutorials.PAGES if notebook(page).is_file()], ids=lambda page: page.stem
)
def test_a_notebook_has_the_code_of_its_tutorial(page):
    nbformat = pytest.importorskip("nbformat")
    stored = nbformat.read(notebook(page), as_version=4)
    both = stored.cells, tutorials.cells(page).cells
    code = [[cell.source for cell in each if cell.cell_type == "code"] for each in both]
    assert code[0] == code[1]
    assert notebook(page).stat().st_size < 60_000
