"""A panorama of a flat scene or from one viewpoint: `python scripts/stitch.py a.jpg b.jpg panorama.jpg`."""

import argparse
from pathlib import Path

import cv2
import numpy as np

import matcher
from matcher.errors import UsageError
from matcher.files import check_output, write_output
from matcher.geometry import upright_matrix, warp_points
from matcher.images import is_image

_LARGEST = 20_000  # pixels, a side of the panorama


def chained(found, group):
    """(3, 3) of each image of a group → the pixels of the one in the middle, along the strongest pairs."""
    pairs = {pair: geometry for pair, (_, geometry) in found.pairs.items() if geometry.status == "ok"}
    strength = {image: sum(g.inliers.sum() for pair, g in pairs.items() if image in pair) for image in group}
    placed = {max(group, key=strength.get): np.eye(3)}
    while len(placed) < len(group):
        edges = [pair for pair in pairs if len(placed.keys() & set(pair)) == 1]
        first, second = max(edges, key=lambda pair: pairs[pair].inliers.sum())
        matrix = pairs[first, second].matrix
        if first in placed:
            placed[second] = placed[first] @ np.linalg.inv(matrix)
        else:
            placed[first] = placed[second] @ matrix
    return placed


def adjusted(found, placed, rounds=40):
    """The same maps, moved so that each track's points meet: its mean and the maps are found in turns.

    Points far from their track's mean, fewer pixels from round to round, are of wrong matches and left out.
    """
    track, image, keypoint = np.array([row for row in found.tracks.table() if row[1] in placed]).T
    points = np.array([found.features[i].keypoints[k].numpy() for i, k in zip(image, keypoint, strict=True)])
    reference, good = next(iter(placed)), np.ones(len(points), dtype=bool)
    for limit in np.geomspace(40, 3, rounds):
        moved = np.full(points.shape, np.nan)
        for number, matrix in placed.items():
            moved[image == number] = warp_points(points[image == number], matrix)
        good &= np.isfinite(moved).all(axis=1)
        count = np.bincount(track[good], minlength=len(found.tracks))
        sums = [np.bincount(track[good], side[good], minlength=len(count)) for side in moved.T]
        mean = (np.stack(sums, axis=1) / np.maximum(count, 1)[:, None])[track]
        good = (np.linalg.norm(moved - mean, axis=1) < limit) & (count[track] > 1)
        for number in placed.keys() - {reference}:
            own = good & (image == number)
            if own.sum() >= 12:
                placed[number] = cv2.findHomography(points[own], mean[own], 0)[0]
    return placed


def stitched(images, maps):
    """The panorama (H, W, 3) of images whose maps lead to one plane: gains, seams, bands of frequencies."""
    sizes = [image.shape[1::-1] for image in images]
    outlines = [
        warp_points(np.array([[0, 0], [w, 0], [w, h], [0, h]]) - 0.5, m)
        for (w, h), m in zip(sizes, maps, strict=True)
    ]
    low, high = (np.floor(f(np.vstack(outlines), axis=0)) for f in (np.min, np.max))
    if not np.isfinite([low, high]).all() or (high - low).max() > _LARGEST:
        raise UsageError("these images span too wide an angle for one plane; stitch fewer of them")
    corners, pieces, masks = [], [], []
    for image, outline, matrix in zip(images, outlines, maps, strict=True):
        start, end = np.floor(outline.min(axis=0)).astype(int), np.ceil(outline.max(axis=0)).astype(int) + 1
        warp = np.array([[1, 0, -start[0]], [0, 1, -start[1]], [0, 0, 1]]) @ matrix
        size = tuple(int(side) for side in end - start)
        cover = cv2.warpPerspective(
            np.full(image.shape[:2], 255, np.uint8), warp, size, flags=cv2.INTER_NEAREST
        )
        corners.append(tuple(int(value) for value in start))
        pieces.append(cv2.warpPerspective(image, warp, size, borderMode=cv2.BORDER_REFLECT))
        masks.append(cover)
    gains = cv2.detail.ExposureCompensator_createDefault(cv2.detail.ExposureCompensator_GAIN)
    gains.feed(corners, pieces, masks)
    seams = cv2.detail.SeamFinder_createDefault(cv2.detail.SeamFinder_DP_SEAM)
    cut = seams.find([piece.astype(np.float32) for piece in pieces], corners, [mask.copy() for mask in masks])
    blender = cv2.detail.MultiBandBlender()
    blender.prepare(cv2.detail.resultRoi(corners, [piece.shape[1::-1] for piece in pieces]))
    for number, (corner, piece, mask) in enumerate(zip(corners, pieces, cut, strict=True)):
        gains.apply(number, corner, piece, masks[number])
        blender.feed(piece.astype(np.int16), mask, corner)
    return np.clip(blender.blend(None, None)[0], 0, 255).astype(np.uint8)


def main():
    """Match, lay out, blend and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", nargs="+", type=Path, help="two images or more, or a folder")
    parser.add_argument("panorama", type=Path, help="file to write, .png or .jpg")
    parser.add_argument("--preset", default="hybrid-learned")
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args()
    try:
        run(args)
    except matcher.MatcherError as error:
        parser.exit(error.exit_code, f"{error}\n")


def run(args):
    """Write the panorama; raises `MatcherError` with a message for the user."""
    check_output(args.panorama, (".png", ".jpg", ".jpeg"), overwrite=args.overwrite)
    listed = [
        [file for file in sorted(p.iterdir()) if is_image(file)] if p.is_dir() else [p] for p in args.images
    ]
    paths = [path for some in listed for path in some]
    found = matcher.match_set(paths, args.preset, geometry="homography")
    group = found.groups()[0]
    if len(group) < 2:
        raise UsageError("no two of these images overlap")
    for number in set(range(len(paths))) - set(group):
        print(f"{paths[number]}: overlaps with none of the others and is left out")
    placed = adjusted(found, chained(found, group))
    images = [matcher.read_image(paths[number], resize=None) for number in group]
    turns = [upright_matrix(image.size, image.orientation) for image in images]
    turn = turns[group.index(next(iter(placed)))]
    maps = [turn @ placed[n] @ np.linalg.inv(t) for n, t in zip(group, turns, strict=True)]
    pixels = [np.dstack([p] * 3) if p.ndim == 2 else p for p in (image.pixels for image in images)]
    panorama = stitched(pixels, maps)
    write_output(args.panorama, cv2.imencode(args.panorama.suffix, panorama[..., ::-1])[1].tobytes())
    height, width = panorama.shape[:2]
    print(f"wrote {args.panorama}: {len(group)} of {len(paths)} images, {width} x {height}")


if __name__ == "__main__":
    main()
