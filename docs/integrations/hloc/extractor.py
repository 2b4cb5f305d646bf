"""The learned front end for hloc: copy to `hloc/extractors/matcher_vision.py`.

confs["matcher-learned"] = {
    "output": "feats-matcher-learned",
    "model": {"name": "matcher_vision", "max_keypoints": 2048},
    "preprocessing": {"grayscale": True, "resize_max": 1024},
}
"""

from hloc.utils.base_model import BaseModel

import matcher


class Learned(BaseModel):
    """Keypoints and descriptors of `matcher`'s own front end."""

    default_conf = {"max_keypoints": 2048}
    required_inputs = ["image"]

    def _init(self, conf):
        self.pipeline = matcher.load("nearest-learned", max_keypoints=conf["max_keypoints"])

    def _forward(self, data):
        found = self.pipeline.extract(data["image"][0])
        return {
            "keypoints": found.keypoints[None],
            "scores": found.scores[None],
            "descriptors": found.descriptors.T[None],
        }
