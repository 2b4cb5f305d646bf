"""Scripts explain themselves, and what they compute beside calling the library."""

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.mark.parametrize("name", ["benchmark", "fit", "gate", "localization", "measure", "release"])
def test_scripts_explain_themselves(name):
    done = subprocess.run(
        [sys.executable, SCRIPTS / f"{name}.py", "--help"], capture_output=True, text=True, check=True
    )
    assert "usage" in done.stdout


def test_the_leaderboard_is_that_of_the_stored_results():
    subprocess.run([sys.executable, SCRIPTS / "leaderboard.py", "write", "--check"], check=True)


@pytest.fixture
def gate(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("gate")


def test_the_gate_tells_what_was_found_again(gate):
    points = np.random.default_rng(0).uniform(0, 600, (20, 4))
    recorded = {
        "points": points,
        "scores": np.full(20, 0.7),
        "inliers": np.arange(20) < 15,
        "model": np.eye(3),
        "status": np.asarray("ok"),
        "verdict": np.asarray(0.9),
    }
    assert gate.compare(recorded, recorded, plane=True) == (20, 20, 20, 20, 0, 0, 0, False)
    moved = np.array([[1, 0, 2.0], [0, 1, 0], [0, 0, 1]])
    other = recorded | {
        "points": points[::-1][:18] + 0.01,
        "model": moved,
        "verdict": np.asarray(0.8),
        "scores": np.full(18, 0.7),
    }
    count, again, present, kept, _, verdict, model, failed = gate.compare(recorded, other, plane=True)
    assert (count, again, present, kept, failed) == (20, 18, 18, 18, False)
    assert (verdict, model) == pytest.approx((0.1, 2.0))
    assert gate.compare(recorded, recorded | {"status": np.asarray("no_model")}, plane=True)[-1]


def test_the_views_are_measured(tmp_path, views, shipped_weights):
    """`measure.py parts` on two warps of the demo views."""
    for view in views:
        (tmp_path / view.name).symlink_to(view)
    command = [sys.executable, SCRIPTS / "measure.py", "parts", tmp_path, "--pairs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| without further passes |" in done.stdout and "| without features |" in done.stdout
