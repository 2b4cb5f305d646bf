import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sequence_walls import BASELINE, CAMERA, STEP, make_walls, write_pairs

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "odometry.py"


def test_the_example_is_short_and_uses_the_public_api_alone():
    lines = SCRIPT.read_text("utf-8").splitlines()
    assert len(lines) < 80
    assert not [line for line in lines if "matcher." in line and line.lstrip().startswith(("from", "import"))]


@pytest.mark.parametrize("stereo", [True, False])
def test_the_example_finds_the_way(tmp_path, stereo):
    left, right, _ = write_pairs(tmp_path, make_walls(), count=8)
    pairs = ["--right", right, "--baseline", BASELINE] if stereo else []
    command = [sys.executable, SCRIPT, left, "--camera", CAMERA, "--preset", "nearest", *pairs]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = np.array([[float(word) for word in line.split()] for line in done.stdout.splitlines()])
    frames, places, turns = rows[:, 0], rows[:, 1:4], rows[:, 4:]
    assert len(frames) >= (8 if stereo else 4)
    truth = np.column_stack([STEP * (frames - frames[0]), 0 * frames, 0 * frames])
    places = places - places[0]
    scale = 1.0 if stereo else np.sum(places * truth) / np.sum(places * places)
    assert np.linalg.norm(scale * places - truth, axis=1).max() < 0.1 * np.linalg.norm(truth[-1])
    np.testing.assert_allclose(np.linalg.norm(turns, axis=1), 1.0, atol=1e-6)
    assert turns[:, 3].min() > 0.999
