"""Keypoint matching with the dictionaries of `transformers`' `post_process_keypoint_matching`."""

import torch

import matcher


def keypoint_matching(pairs, preset="hybrid-learned", **options):
    """For each pair of images (paths, PIL images or arrays) keypoints0, keypoints1 and matching_scores."""
    pipe = matcher.load(preset, **options)
    found = [pipe.match(image0, image1) for image0, image1 in pairs]
    names = {"keypoints0": "points0", "keypoints1": "points1", "matching_scores": "scores"}
    return [{key: torch.from_numpy(getattr(one, name)) for key, name in names.items()} for one in found]
