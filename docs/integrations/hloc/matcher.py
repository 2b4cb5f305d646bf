"""The attention network for hloc: copy to `hloc/matchers/matcher_vision.py`.

confs["matcher-hybrid-learned"] = {
    "output": "matches-matcher-hybrid-learned",
    "model": {"name": "matcher_vision"},
}
"""

import torch
from hloc.utils.base_model import BaseModel

import matcher


class HybridLearned(BaseModel):
    """Matches of features that the extractor beside it found."""

    default_conf = {"preset": "hybrid-learned"}
    required_inputs = ["image0", "keypoints0", "descriptors0", "image1", "keypoints1", "descriptors1"]

    def _init(self, conf):
        self.pipeline = matcher.load(conf["preset"])

    def _forward(self, data):
        features = []
        for i in "01":
            descriptors = torch.nn.functional.normalize(data["descriptors" + i][0].T, dim=1)
            size = tuple(data["image" + i].shape[:1:-1])
            points = data["keypoints" + i][0]
            features.append(matcher.Features(points, descriptors, size=size, kind="learned"))
        found = self.pipeline.match_features(*features)
        matches = torch.full((1, len(features[0])), -1)
        scores = torch.zeros(1, len(features[0]))
        first, second = torch.from_numpy(found.indices).T
        matches[0, first], scores[0, first] = second, torch.from_numpy(found.scores)
        return {"matches0": matches, "matching_scores0": scores}
