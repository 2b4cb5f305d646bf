"""What a spawned process does: load a preset and match pairs. Spawned processes import it by its name."""

import matcher


def facts(result) -> list:
    """Points, scores and inliers of a result, as lists that can be compared and sent."""
    inliers = result.geometry.inliers.tolist()
    return [result.points0.tolist(), result.points1.tolist(), result.scores.tolist(), inliers]


def match_all(preset: str, pairs: list) -> list:
    """`facts` of each pair, by a pipeline that is loaded here."""
    pipe = matcher.load(preset, max_keypoints=128, device="cpu")
    return [facts(pipe.match(*pair)) for pair in pairs]
