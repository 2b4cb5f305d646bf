"""`matcher` in vismatch: copy to `vismatch/im_models/matcher_vision.py`."""

from vismatch import BaseMatcher

import matcher


class MatcherVision(BaseMatcher):
    """Any preset of `matcher`; `kwargs` may hold `max_num_keypoints` and vismatch's own options."""

    def __init__(self, device="cpu", preset="hybrid-learned", max_num_keypoints=2048, **kwargs):
        super().__init__(device, **kwargs)
        self.pipeline = matcher.load(preset, device=device, max_keypoints=max_num_keypoints)

    def _forward(self, img0, img1):
        result = self.pipeline.match(img0.clamp(0, 1), img1.clamp(0, 1))
        features0, features1 = result.features0, result.features1
        return (
            result.points0,
            result.points1,
            features0.keypoints,
            features1.keypoints,
            features0.descriptors,
            features1.descriptors,
            result.scores,
        )
