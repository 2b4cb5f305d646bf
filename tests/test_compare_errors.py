"""Errors that two presets have in common."""

import importlib.util
from pathlib import Path

import numpy as np

PATH = Path(__file__).resolve().parent.parent / "scripts" / "compare_errors.py"


def test_a_common_error_is_told_from_own_ones(rng):
    spec = importlib.util.spec_from_file_location("compare_errors", PATH)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    truth = np.eye(4)
    truth[:3, 3] = [0, 0, 2]

    def found(*offset: float) -> np.ndarray:
        pose = np.eye(4)
        pose[:3, 3] = -3 * (np.array([0, 0, 1]) + np.radians(offset))  # the sign and the length are free
        return pose

    np.testing.assert_allclose(script.direction_error(found(0.3, 0, 0), truth), [0.3, 0, 0], atol=1e-3)
    common = rng.normal(0, 0.3, (40, 3)) * [1, 1, 0]
    own = [0.02 * rng.normal(size=(40, 3)) * [1, 1, 0] for _ in range(4)]
    both = [
        np.array([script.direction_error(found(*error), truth) for error in errors])
        for errors in (common + own[0], common + own[1], own[2], own[3])
    ]
    alike = script.report(["a", "b"], both[0], both[1])
    assert "40 pairs" in alike and float(alike.split()[-1]) > 0.95
    assert abs(float(script.report(["a", "b"], both[2], both[3]).split()[-1])) < 0.6
