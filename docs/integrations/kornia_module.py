"""`matcher` as a module with the dictionary of `kornia.feature.LoFTR`."""

import torch

import matcher


class LearnedMatcher(torch.nn.Module):
    """Images (N, 1 or 3, H, W) in [0, 1] in; keypoints0, keypoints1, confidence and batch_indexes out."""

    def __init__(self, preset="hybrid-learned", **options):
        super().__init__()
        self.pipeline = matcher.load(preset, **options)

    def forward(self, data):
        """Match `data["image0"]` with `data["image1"]`, pair by pair."""
        found = [self.pipeline.match(a, b) for a, b in zip(data["image0"], data["image1"], strict=True)]
        counts = torch.tensor([len(one.matches) for one in found])
        return {
            "keypoints0": torch.cat([torch.from_numpy(one.points0) for one in found]),
            "keypoints1": torch.cat([torch.from_numpy(one.points1) for one in found]),
            "confidence": torch.cat([torch.from_numpy(one.scores) for one in found]),
            "batch_indexes": torch.arange(len(found)).repeat_interleave(counts),
        }
