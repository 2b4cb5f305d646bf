"""Draw docs/pictures/architecture.svg: what the default preset does with two images, with its own numbers.

python scripts/draw_architecture.py
"""

import sys
from html import escape
from pathlib import Path

from matcher.presets import DEFAULT_PRESET, PRESETS

PLACE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "architecture.svg"
WIDTH, HEIGHT = 960, 560
STYLE = """
.box { fill: #e3f2f1; stroke: #00796b; stroke-width: 1.5 }
.net { fill: #d9e6f7; stroke: #1d5fa8; stroke-width: 1.5 }
.loop { fill: none; stroke: #1d5fa8; stroke-width: 1.5; stroke-dasharray: 6 4 }
.arrow { fill: none; stroke: #455a64; stroke-width: 1.6; marker-end: url(#head) }
text { font: 14px system-ui, sans-serif; fill: #123; text-anchor: middle }
.small { font-size: 11.5px; fill: #345 }
.file { font: 11px ui-monospace, monospace; fill: #5d4037 }
.left { text-anchor: start }
.paper { fill: #ffffff }
"""


def box(x: float, y: float, width: float, title: str, lines: list[str], file: str, kind: str = "box") -> str:
    """A rounded box with a title, small lines and the file that holds it."""
    height, middle = 44 + 16 * len(lines), x + width / 2
    parts = [f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="7"/>']
    parts.append(f'<text x="{middle}" y="{y + 20}">{escape(title)}</text>')
    for row, line in enumerate(lines):
        parts.append(f'<text class="small" x="{middle}" y="{y + 38 + 16 * row}">{escape(line)}</text>')
    parts.append(f'<text class="file" x="{middle}" y="{y + height - 7}">{escape(file)}</text>')
    return "\n".join(parts)


def arrow(
    *points: tuple[float, float], label: str = "", at: tuple[float, float] = (0, 0), left: bool = True
) -> str:
    """A line through points with a head, and a small label."""
    path = " L ".join(f"{x} {y}" for x, y in points)
    text = (
        f'<text class="small{" left" * left}" x="{at[0]}" y="{at[1]}">{escape(label)}</text>' if label else ""
    )
    return f'<path class="arrow" d="M {path}"/>{text}'


def drawing() -> str:
    """The picture."""
    preset = PRESETS[DEFAULT_PRESET]
    network, extractor, estimation = preset.matcher, preset.extractor, preset.estimation
    context, policy = network.context, network.policy
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="The way of two images through the preset {DEFAULT_PRESET}">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#455a64"/></marker></defs>',
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
    ]
    for index, y in enumerate((30, 150)):
        parts.append(box(20, y, 130, f"image {index}", ["upright,", f"≤ {extractor.resize} px"], "images.py"))
        parts.append(
            box(
                215,
                y,
                175,
                "front end",
                [f"{extractor.max_keypoints} keypoints,", f"{network.descriptor_dim}-d descriptors"],
                "extract/front_end.py",
                "net",
            )
        )
        parts.append(arrow((150, y + 38), (213, y + 38)))
    parts.append(box(455, 90, 165, "turn", ["quarter turn of", "image 1 that fits"], "match/steering.py"))
    parts.append(arrow((390, 68), (425, 68), (425, 118), (453, 118), label="Features", at=(396, 60)))
    parts.append(arrow((390, 188), (425, 188), (425, 138), (453, 138), label="Features", at=(396, 206)))
    # The network.
    parts.append('<rect class="loop" x="650" y="20" width="295" height="312" rx="10"/>')
    parts.append(
        f'<text class="small" x="797" y="38">{context.depth} layers, {context.dim} channels, '
        f"{context.heads} heads</text>"
    )
    parts.append(
        box(
            668,
            48,
            259,
            "self- and cross-attention",
            ["rotary positions"],
            "match/blocks.py, attention.py",
            "net",
        )
    )
    parts.append(box(668, 122, 259, "guidance", ["each point's expected partner"], "match/network.py", "net"))
    parts.append(
        box(
            668,
            196,
            259,
            "exit and pruning",
            [
                f"stop when {policy.exit_share:.0%} are settled,",
                f"drop points below {policy.prune_matchability:g}",
            ],
            "match/adaptivity.py",
            "net",
        )
    )
    for y in (108, 182):
        parts.append(arrow((797, y), (797, y + 13)))
    parts.append(arrow((927, 234), (939, 234), (939, 78), (929, 78)))
    parts.append('<text class="small" x="797" y="300">all in one run, both images one</text>')
    parts.append('<text class="small" x="797" y="316">sequence; a pair leaves when it is done</text>')
    parts.append(arrow((620, 128), (648, 128)))
    # After it, from right to left.
    parts.append(
        box(
            700,
            380,
            245,
            "assign",
            [
                "Sinkhorn, a dustbin for each point,",
                f"{network.assignment.consensus} × consensus, mutual, p ≥ {policy.match_threshold:g}",
            ],
            "match/sinkhorn.py, consensus.py",
            "net",
        )
    )
    parts.append(arrow((797, 332), (797, 378)))
    parts.append(
        box(470, 380, 160, "refine", [f"windows of {preset.refine.window} px,", "least squares"], "refine.py")
    )
    parts.append(arrow((700, 418), (632, 418), label="Matches", at=(640, 408)))
    parts.append(
        box(255, 380, 180, "verify", ["MAGSAC++, likeliest", f"{estimation.kind} matrix"], "verify/")
    )
    parts.append(arrow((470, 418), (437, 418)))
    parts.append(box(20, 380, 185, "result", ["probabilities,", "inliers, verdict"], "result.py"))
    parts.append(arrow((255, 418), (207, 418)))
    parts.append(
        box(
            215,
            262,
            405,
            "further passes, unless enough agree",
            ["scales, gradients, SIFT, tilted views, common region"],
            "passes.py",
        )
    )
    parts.append(arrow((345, 380), (345, 324)))
    parts.append(arrow((300, 262), (300, 226), label="look again", at=(306, 250)))
    parts.append(
        '<text class="small left" x="20" y="500">Blue: networks. Brown: the file in matcher/. '
        f"Numbers are those of the preset {DEFAULT_PRESET}.</text>"
    )
    parts.append(
        '<text class="small left" x="20" y="522">SuperGlue and LightGlue run through the same boxes, '
        "without turn and guidance; LoFTR has cells of a grid in place of keypoints.</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    """Draw it."""
    PLACE.parent.mkdir(parents=True, exist_ok=True)
    PLACE.write_text(drawing(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
