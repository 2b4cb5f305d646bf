"""Presets with one part switched off, and the time of decisions."""

from dataclasses import replace

import cv2
import numpy as np
import pytest

import matcher
from matcher.errors import UsageError
from matcher.evaluate.calibration import ALL, PARTS, DecisionTime, decision_time, without_each
from matcher.evaluate.protocols import PairImage, UnrelatedPair


def test_each_row_lacks_one_part_and_nothing_else():
    methods = {method.name: method.pipeline for method in without_each("hybrid-learned", {"device": "cpu"})}
    assert list(methods) == [ALL, *(f"without {name}" for name in PARTS)]
    whole, fewer = methods[ALL].config, {name: methods[f"without {name}"] for name in PARTS}
    assert whole == matcher.load(device="cpu").config
    assert fewer["further passes"].passes is None and fewer["working size"].passes is not None
    assert fewer["second front end"].passes.other is None and methods[ALL].passes.other is not None
    assert not fewer["common region"].passes.config.region and fewer["common region"].passes.config.negative
    assert fewer["calibration"].config.matcher.policy.calibration is None
    size = replace(whole, extractor=whole.extractor.of_size(1024))
    assert fewer["working size"].config == size != whole


def test_presets_without_further_passes_have_nothing_to_switch_off():
    with pytest.raises(UsageError, match="no further passes"):
        without_each("nearest", {})


def test_decisions_are_timed_where_one_pass_is_enough(views):
    pipeline = matcher.load(max_keypoints=200, resize=320, device="cpu")
    pixels = cv2.resize(cv2.imread(str(views[0])), (320, 240))
    noise = np.random.default_rng(0).integers(0, 255, pixels.shape, dtype=np.uint8)
    same, other = (PairImage(views[0], pixels), PairImage(views[1], noise))
    easy, hard = UnrelatedPair("easy", "", same, same), UnrelatedPair("hard", "", same, other)
    found = decision_time(pipeline, [easy, hard])
    assert found.pairs == 1 and found.whole > found.further > 0
    with pytest.raises(UsageError, match="one pass is enough for none"):
        decision_time(pipeline, [hard])


def test_the_share_is_of_the_time_without_decisions():
    assert DecisionTime(3, 105.0, 4.0, 1.0).share == pytest.approx(0.05)
