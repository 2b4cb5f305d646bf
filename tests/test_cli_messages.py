"""Help, messages and what the shell sees: `-h`, `-v`, `-q`, `--log`, completion, `matcher env`."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import PIL.Image
import pytest
import typer
from command import run

import matcher
from matcher.cli import COMMANDS, GROUPS, build, main
from matcher.cli.machine import VARIABLES
from matcher.presets import DEFAULT_PRESET, find_preset

ROOT = Path(__file__).resolve().parent.parent
EVERY = [[name] for name in COMMANDS] + [
    [group, name] for group, (_, names) in GROUPS.items() for name in resolve_name(names)
]


def help_of(capfd, *command: str) -> str:
    assert run(*command, "--help") == 0
    return " ".join(capfd.readouterr().out.split())


@pytest.mark.parametrize("command", [[], *EVERY], ids=" ".join)
def test_every_command_has_short_help_and_says_what_it_does(command, capfd):
    assert run(*command, "-h") == 0
    short = capfd.readouterr().out
    assert run(*command, "--help") == 0
    assert short == capfd.readouterr().out
    assert re.search(r"^  [A-Z][^\n]+", short, re.MULTILINE), "a sentence"
    for option in ("--verbose", "--quiet", "--log") if command else ():
        assert option in short


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_every_option_is_described(command):
    group = typer.main.get_command(build())
    for name in command:
        group = group.commands[name]
    described = {parameter.name: getattr(parameter, "help", None) for parameter in group.params}
    arguments = {parameter.name for parameter in group.params if parameter.param_type_name == "argument"}
    assert [name for name, text in described.items() if not text and name not in arguments] == []


def test_help_shows_the_defaults_of_the_preset(capfd):
    config = find_preset(DEFAULT_PRESET)
    text = help_of(capfd, "match")
    for value in (
        config.extractor.max_keypoints,
        config.extractor.resize,
        f"{config.matcher.policy.match_threshold:g}",
        config.estimation.kind,
    ):
        assert f"[default: ({value})]" in text


def test_help_shows_what_a_command_has_instead(capfd):
    text = help_of(capfd, "sfm")
    assert "[default: (2048)]" in text and "[default: (largest)]" in text
    assert "[default: (0.2)]" in help_of(capfd, "track")


def test_quiet_leaves_errors_and_what_was_asked_for(views, tmp_path, capfd):
    arguments = ["match", *views, "--preset", "nearest", "--max-keypoints", 100]
    assert run(*arguments, "-q", "--output", tmp_path / "r.npz") == 0
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "r.npz").is_file()
    assert run(*arguments, "-q", "--json") == 0
    assert capfd.readouterr().out.startswith("{")
    assert run("match", views[0], tmp_path / "gone.jpg", "-q") == 3
    assert "gone.jpg" in capfd.readouterr().err


def test_verbose_says_more_and_contradicts_quiet(views, capfd):
    arguments = ["match", *views, "--preset", "nearest", "--max-keypoints", 100]
    assert run(*arguments, "-v") == 0
    assert "matcher: weights: none" in capfd.readouterr().err
    assert run(*arguments, "-v", "-q") == 2
    assert "-v and -q" in capfd.readouterr().err


def test_a_log_is_appended_to_and_holds_everything(views, tmp_path, capfd):
    log = tmp_path / "run.log"
    assert run("match", *views, "--preset", "nearest", "--max-keypoints", 100, "--log", log, "-q") == 0
    assert run("match", views[0], tmp_path / "gone.jpg", "--log", log) == 3
    capfd.readouterr()
    text = log.read_text()
    assert text.startswith("# written by matcher\n")
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ DEBUG   command: ", text, re.MULTILINE)
    assert re.search(r"INFO    .*view0\.jpg  800 x 600  100 keypoints", text)
    assert re.search(r"ERROR   .*gone\.jpg", text)
    assert [line[-1] for line in text.splitlines() if "exit code" in line] == ["0", "3"]


def test_a_log_never_touches_the_file_of_somebody_else(views, tmp_path, capfd):
    picture = tmp_path / "a.jpg"
    picture.write_bytes(views[0].read_bytes())
    assert run("match", picture, views[1], "--log", picture) == 2
    assert "is not a log of matcher" in capfd.readouterr().err
    assert picture.read_bytes() == views[0].read_bytes()
    assert run("match", picture, views[1], "--log", tmp_path / "none" / "x.log") == 2
    assert "cannot be written" in capfd.readouterr().err


def test_the_log_of_an_internal_error_has_its_traceback(views, tmp_path, monkeypatch, capfd):
    def broken(*_, **__):
        raise KeyError("surprise")

    monkeypatch.setattr("matcher.loading.load", broken)
    assert run("match", *views, "--log", tmp_path / "run.log") == 1
    assert "Traceback" not in capfd.readouterr().err
    assert "KeyError: 'surprise'" in (tmp_path / "run.log").read_text()
    assert "Traceback" in (tmp_path / "run.log").read_text()


def test_messages_leave_no_handlers_behind(capfd):
    import logging

    before = list(logging.getLogger("matcher").handlers)
    assert run("presets") == 0
    assert logging.getLogger("matcher").handlers == before


def test_messages_name_the_options_that_were_typed(views, tmp_path, capfd):
    (tmp_path / "r.json").write_text("somebody's")
    for arguments, words in (
        (["--threshold", 7], "--match-threshold must be a number from 0 to 1"),
        (["--output", tmp_path / "r.json"], "--overwrite"),
        (["--geometry", "essential"], "--camera0"),
    ):
        assert run("match", *views, "--preset", "nearest", *arguments) == 2
        assert words in capfd.readouterr().err


def test_a_preset_is_shown_whole(capfd):
    assert run("presets", "--show", DEFAULT_PRESET) == 0
    rows = [line.split(None, 2) for line in capfd.readouterr().out.splitlines()]
    assert len(rows) > 60
    values = {row[0]: row[1] for row in rows}
    assert values["extractor.max_keypoints"] == "2048"
    assert values["matcher.policy.match_threshold"] == "0.05"
    assert run("presets", "--show", "hybird") == 2
    assert "hybrid" in capfd.readouterr().err


def test_the_library_names_arguments_not_options():
    """Whole commands, between backticks, are the same for all; a lone option means nothing in Python."""
    for path in sorted((ROOT / "matcher").rglob("*.py")):
        if {"cli", "evaluate", "train", "benchmark.py"} & set(path.relative_to(ROOT).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Raise):
                text = "".join(part.value for part in ast.walk(node) if is_text(part))
                assert not re.search(r"(?<!\w)--[a-z]", re.sub(r"`[^`]*`", "", text)), (path, text)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_only_near_names_are_suggested(views, capfd):
    assert run("match", *views, "--foo", 1) == 2
    assert "--log" not in capfd.readouterr().err
    assert run("match", *views, "--keypoints", 1) == 2
    assert "--max-keypoints" in capfd.readouterr().err


def test_env_lists_every_variable_that_the_project_reads(capfd, monkeypatch):
    sources = [path for folder in ("matcher", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]
    named = {
        name for path in sources for name in re.findall(r"\bMATCHER_[A-Z_]+[A-Z]", path.read_text("utf-8"))
    }
    assert named == {name for name in VARIABLES if name.startswith("MATCHER_")}
    monkeypatch.setenv("MATCHER_CACHE", "/some/where")
    assert run("env") == 0
    out = capfd.readouterr().out
    assert f"matcher {matcher.__version__}, Python" in out
    assert "cache: /some/where" in out and "set to '/some/where'" in out
    assert all(name in out for name in VARIABLES)


@pytest.mark.skipif(os.name == "nt", reason="completion of POSIX shells")
def test_the_shell_completes_commands_options_and_presets():
    def complete(words: str) -> list[str]:
        variables = {
            "_MATCHER_COMPLETE": "complete_bash",
            "COMP_WORDS": f"matcher {words}",
            "COMP_CWORD": str(len(words.split(" "))),
        }
        done = subprocess.run(
            [sys.executable, "-m", "matcher"], env={**os.environ, **variables}, capture_output=True, text=True
        )
        return done.stdout.split()

    assert {"match", "merge"} <= set(complete("m"))
    assert "--max-keypoints" in complete("match --max")
    assert {"superglue-indoor", "superglue-outdoor"} == set(complete("match --preset superglue"))


def test_a_warning_is_one_line_without_source(tmp_path, capfd):
    pages = [PIL.Image.new("L", (90, 60), shade) for shade in (10, 200)]
    path = tmp_path / "pages.tif"
    pages[0].save(path, save_all=True, append_images=pages[1:])
    assert main(["match", str(path), str(path), "--preset", "nearest"]) == 0
    errors = [line for line in capfd.readouterr().err.splitlines() if "pages" in line]
    assert errors and all(line.endswith("has 2 pages; the first one is used") for line in errors)
    assert not any(".py:" in line or "ImageWarning" in line for line in errors)
