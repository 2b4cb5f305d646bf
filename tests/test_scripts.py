"""Scripts explain themselves, and what they compute beside calling the library."""

import importlib
import subprocess
import sys
from pathlib import Path

import cv2
import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def script(monkeypatch):
    """Scripts as modules, by name."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


@pytest.mark.parametrize("name", ["benchmark", "fit", "gate", "localization", "measure", "release"])
def test_scripts_explain_themselves(script, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        script(name).main()
    assert "usage" in capsys.readouterr().out


def test_documents_and_the_leaderboard_are_those_of_the_stored_results():
    subprocess.run([sys.executable, SCRIPTS / "results.py", "--check"], check=True)


@pytest.mark.slow
def test_passes_are_switched_off_one_by_one(tmp_path, script, views, monkeypatch, capsys, shipped_weights):
    small = cv2.resize(cv2.imread(str(views[0])), (400, 300), interpolation=cv2.INTER_AREA)
    cv2.imwrite(str(tmp_path / "photo.png"), small)  # whose warps are matched in one pass
    monkeypatch.setattr(sys, "argv", ["measure", "parts", str(tmp_path), "--pairs", "1"])
    assert script("measure").main() == 0
    said = capsys.readouterr().out
    assert "| without further passes |" in said and "| without features |" in said
