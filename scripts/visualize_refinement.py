"""Draw three matches before and after refinement, enlarged eight times.

    python scripts/visualize_refinement.py assets/view0.jpg assets/view1.jpg refined.png

Each row is a match: the window of image 0, that of image 1 around the position where it was matched, and that
around the refined one. Both windows of image 1 are deformed by the local affine map to look like that of the
first. The crosses mark the point. Shown are inliers of the more certain half, from those that moved most.
"""

import cv2
import numpy as np
from pair_arguments import load_pipeline, pair_parser

import matcher
from matcher.config import RefineConfig
from matcher.files import write_whole
from matcher.refine import fit_affine_maps

ENLARGED, HALF, SHOWN = 8, 12, 3  # times; pixels of a window to either side; matches


def window(image: matcher.Image, point: np.ndarray, affine: np.ndarray, words: str) -> np.ndarray:
    """(H, W, 3) uint8 window around a stored pixel, with a cross in its middle."""
    grey = image.stored if image.stored is not None else image.grey()
    reach = np.arange(-HALF * ENLARGED, HALF * ENLARGED + 1, dtype=np.float32) / ENLARGED
    places = np.stack(np.meshgrid(reach, reach), axis=-1) @ affine.T + point
    x, y = np.float32(places[..., 0]), np.float32(places[..., 1])
    values = cv2.remap(np.float32(grey), x, y, cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE)
    pixels = cv2.normalize(values, None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)
    drawn = cv2.cvtColor(pixels, cv2.COLOR_GRAY2BGR)
    cv2.drawMarker(drawn, (HALF * ENLARGED, HALF * ENLARGED), (0, 0, 255), cv2.MARKER_CROSS, 40, 1)
    cv2.rectangle(drawn, (0, 0), (150, 20), (0, 0, 0), cv2.FILLED)
    cv2.putText(drawn, words, (5, 15), cv2.FONT_HERSHEY_SIMPLEX, 0.45, (255, 255, 255), 1, cv2.LINE_AA)
    return cv2.copyMakeBorder(drawn, 3, 3, 3, 3, cv2.BORDER_CONSTANT, value=(255, 255, 255))


def choose(moved: np.ndarray, deviation: np.ndarray, possible: np.ndarray) -> list[int]:
    """Rows of certain matches, spread over the tenth of them that moved most."""
    certain = np.flatnonzero(possible & (deviation <= np.median(deviation[possible])))
    most = certain[np.argsort(-moved[certain])]
    return most[np.linspace(0, len(most) // 10, SHOWN).astype(int)].tolist()


parser = pair_parser(__doc__.splitlines()[0])
args = parser.parse_args()
try:
    pipeline = load_pipeline(args, refine=False)
    before = pipeline.match(args.image0, args.image1)
    images = [matcher.read_image(path, resize=None, upright=False) for path in (args.image0, args.image1)]
    after = load_pipeline(args).refine(args.image0, args.image1, before.matches)
except matcher.MatcherError as error:
    parser.exit(error.exit_code, f"{error}\n")
refinement = after.refinement
points0, points1 = before.points0.astype(float), before.points1.astype(float)
maps, known = fit_affine_maps(points0, points1, RefineConfig().neighbours)
shown = refinement.accepted & known & before.geometry.inliers
if np.count_nonzero(shown) < SHOWN:
    parser.exit(4, f"fewer than {SHOWN} matches were refined: {refinement.counts()}\n")
moved = np.linalg.norm(after.points1 - points1, axis=1)
deviation = np.sqrt(np.linalg.eigvalsh(refinement.covariances)[:, 1])
rows = []
for row in choose(moved, deviation, shown):
    sides = (
        window(images[0], points0[row], np.eye(2), "image 0"),
        window(images[1], points1[row], maps[row], "image 1, as matched"),
        window(images[1], after.points1[row], maps[row], f"refined by {moved[row]:.2f} px"),
    )
    rows.append(np.hstack(sides))
write_whole(args.output, cv2.imencode(args.output.suffix, np.vstack(rows))[1].tobytes())
