"""Furniture and small things of boxes, bodies of revolution and sheets, each standing at the origin."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tracing.meshes import Material, Mesh, box, joined, lathed, quad, sheet
from tracing.surfaces import Photos, colour, draw_material, noise


@dataclass(frozen=True, eq=False)
class Maker:
    """Draws things with random shapes and materials."""

    rng: np.random.Generator
    photos: Photos

    def material(self, kind: str | None = None) -> Material:
        """A material of things."""
        return draw_material(self.rng, self.photos, "things", kind)

    def picture(self, **finish: float) -> Material:
        """A photo that is laid on once."""
        return Material(self.photos.draw(self.rng), (0.9, 0.9, 0.9), mirrored=True, **finish)

    # Furniture.

    def table(self) -> Mesh:
        """A rectangular or round table."""
        u = self.rng.uniform
        height, top, thick = u(0.42, 0.8), self.material(), u(0.02, 0.06)
        legs = top if self.rng.random() < 0.5 else self.material("plain")
        if self.rng.random() < 0.25:
            radius = u(0.35, 0.7)
            rim = np.array([[radius, height - thick], [radius, height]])
            cover = np.array([[radius, height], [0, height + 1e-3]])
            under = np.array([[0, height - thick], [radius, height - thick]])
            foot = np.array([[radius * 0.6, 0], [radius * 0.55, 0.02], [0.04, 0.06], [0.04, height - thick]])
            return joined(
                [lathed(p, replace(top, span=1.0)) for p in (rim, cover, under)] + [lathed(foot, legs)]
            )
        x, y, leg = u(0.6, 2.0), u(0.5, 0.95), u(0.03, 0.09)
        inset = leg / 2 + u(0, 0.06)
        feet = [(a * (x / 2 - inset), b * (y / 2 - inset), 0) for a in (-1, 1) for b in (-1, 1)]
        parts = [box((leg, leg, height - thick), legs, foot) for foot in feet]
        return joined([*parts, box((x, y, thick), top, (0, 0, height - thick))])

    def chair(self) -> Mesh:
        """A chair with a straight or slatted back, which is at -y."""
        u = self.rng.uniform
        wood, seat = self.material(), self.material()
        x, y, height, total, leg = u(0.38, 0.5), u(0.38, 0.5), u(0.42, 0.5), u(0.75, 1.1), u(0.025, 0.05)
        parts = [box((x, y, u(0.02, 0.08)), seat, (0, 0, height))]
        for a in (-1, 1):
            place = a * (x - leg) / 2
            parts.append(box((leg, leg, height), wood, (place, (y - leg) / 2, 0)))
            parts.append(box((leg, leg, total), wood, (place, -(y - leg) / 2, 0)))
        if self.rng.random() < 0.5:
            parts.append(box((x - leg, 0.02, u(0.2, 0.5)), seat, (0, -y / 2 + 0.02, total - 0.5)))
        else:
            slats = int(self.rng.integers(2, 6))
            parts += [
                box(
                    (x - leg, 0.015, 0.04),
                    wood,
                    (0, -y / 2 + 0.02, height + (total - height) * (k + 0.7) / slats),
                )
                for k in range(slats)
            ]
        return joined(parts)

    def shelf(self) -> Mesh:
        """A shelf with books, boxes and gaps on its boards; its back is at -y."""
        u, wood = self.rng.uniform, self.material()
        x, y, z = u(0.5, 1.6), u(0.22, 0.4), u(0.7, 2.1)
        parts = [box((0.025, y, z), wood, (a * x / 2, 0, 0)) for a in (-1, 1)]
        if self.rng.random() < 0.6:
            parts.append(box((x, 0.012, z), wood, (0, -y / 2, 0)))
        boards = max(2, int(z / u(0.28, 0.42)))
        for board in range(boards + 1):
            level = board * (z - 0.03) / boards
            parts.append(box((x, y, 0.022), wood, (0, 0, level)))
            if board < boards and self.rng.random() < 0.85:
                parts += self._row(x, y, (z - 0.03) / boards - 0.05, level + 0.022)
        return joined(parts)

    def _row(self, width: float, depth: float, height: float, level: float) -> list[Mesh]:
        """Books or other things in a row on a board."""
        u, place, parts = self.rng.uniform, -width / 2 + 0.03, []
        small = self.rng.random() < 0.65
        look = [self.picture() if self.rng.random() < 0.5 else self.material("plain") for _ in range(5)]
        while place < width / 2 - 0.12:
            thick = u(0.012, 0.05) if small else u(0.08, 0.3)
            thick = min(thick, width / 2 - 0.03 - place)
            size = thick * 0.96, u(0.5, 0.9) * depth, u(0.5, 0.95) * height
            if u() < 0.85:
                parts.append(box(size, look[self.rng.integers(5)], (place + thick / 2, 0, level)))
            place += thick + (u(0, 0.1) if u() < 0.1 else 0.001)
        return parts

    def cabinet(self) -> Mesh:
        """A cabinet whose doors or drawers are at +y, each with a handle."""
        u, body = self.rng.uniform, self.material()
        doors = body if u() < 0.5 else self.material()
        x, y, z = u(0.4, 1.6), u(0.35, 0.6), u(0.45, 2.0)
        columns, rows = max(1, round(x / u(0.35, 0.6))), int(self.rng.integers(1, 5))
        handle = self.material("plain")
        parts = [box((x, y, z), body)]
        for i in range(columns):
            for j in range(rows):
                middle, level = x * ((i + 0.5) / columns - 0.5), z * (j / rows) + 0.012
                size = x / columns - 0.02, z / rows - 0.024
                parts.append(box((size[0], 0.02, size[1]), doors, (middle, y / 2 + 0.01, level)))
                parts.append(box((0.1, 0.02, 0.015), handle, (middle, y / 2 + 0.03, level + size[1] * 0.8)))
        return joined(parts)

    def sofa(self) -> Mesh:
        """A sofa or a bed of cushions; its back is at -y."""
        u, cloth = self.rng.uniform, self.material()
        x, y, seat, back = u(0.8, 2.2), u(0.75, 1.0), u(0.35, 0.48), u(0.7, 1.0)
        parts = [box((x, y, seat * 0.6), cloth), box((x, 0.2, back), cloth, (0, -y / 2 + 0.1, 0))]
        parts += [box((0.16, y, seat + 0.18), cloth, (a * (x / 2 - 0.08), 0, 0)) for a in (-1, 1)]
        count = max(1, round((x - 0.32) / 0.6))
        width = (x - 0.32) / count
        for k in range(count):
            place = -x / 2 + 0.16 + width * (k + 0.5)
            parts.append(self.cushion(cloth, (width, y - 0.22, 0.22)).moved((place, 0.1, seat * 0.55)))
            if u() < 0.5:
                other = self.cushion(self.material(), (0.4, 0.4, 0.16)).turned(_tilt(1.1))
                parts.append(other.moved((place + u(-0.1, 0.1), -y / 2 + 0.32, seat + 0.32), u(-0.3, 0.3)))
        return joined(parts)

    def cushion(self, cloth: Material, size: tuple[float, float, float]) -> Mesh:
        """A rounded block."""
        turn, rise = np.meshgrid(
            np.linspace(-math.pi, math.pi, 33), np.linspace(-math.pi / 2, math.pi / 2, 17)
        )
        c, s = (
            (lambda a: np.sign(np.cos(a)) * np.abs(np.cos(a)) ** 0.35),
            (lambda a: np.sign(np.sin(a)) * np.abs(np.sin(a)) ** 0.35),
        )
        points = np.stack([c(rise) * c(turn), c(rise) * s(turn), s(rise) * 0.9 + 0.1], -1)
        return sheet(points * np.array(size) / 2 + [0, 0, size[2] / 2], cloth)

    def plant(self) -> Mesh:
        """A pot with leaves."""
        u, count = self.rng.uniform, int(self.rng.integers(25, 90))
        size = u(0.12, 0.5)
        pot = lathed(
            size * np.array([[0, 0], [0.3, 0], [0.42, 0.6], [0.36, 0.6], [0.34, 0.5], [0, 0.5]]),
            self.material(),
        )
        green = [
            Material(tint=tuple((np.array([0.12, 0.3, 0.06]) * u(0.3, 1.6, 3)).clip(0, 0.8)), gloss=0.2)
            for _ in range(3)
        ]
        leaves = []
        for _ in range(count):
            length, width, turn, rise = size * u(0.4, 1.4), size * u(0.06, 0.2), u(0, 6.3), u(0.2, 1.5)
            t = np.linspace(0, 1, 5)
            out, up = length * t * math.cos(rise), size * 0.5 + length * (t * math.sin(rise) - 0.4 * t * t)
            half = width * np.sin(np.pi * (0.05 + 0.95 * t)) + 1e-3
            leaf = np.stack([np.stack([out, sign * half, up], -1) for sign in (-1, 1)])
            leaves.append(sheet(leaf, green[self.rng.integers(3)]).moved((0, 0, 0), turn))
        return joined([pot, *leaves])

    def floor_lamp(self) -> Mesh:
        """A lamp on a pole."""
        u, z = self.rng.uniform, self.rng.uniform(1.1, 1.8)
        pole = lathed(np.array([[0.14, 0], [0.14, 0.02], [0.015, 0.03], [0.012, z]]), self.material("plain"))
        shade = np.array([[u(0.12, 0.25), z - 0.05], [u(0.06, 0.16), z + 0.25]])
        return joined([pole, lathed(shade, self.material())])

    def radiator(self) -> Mesh:
        """Equal bars side by side; its back is at -y."""
        u, paint = self.rng.uniform, self.material("plain")
        z, bars, step = u(0.4, 0.7), int(self.rng.integers(8, 25)), u(0.04, 0.07)
        return joined(
            [box((step * 0.7, 0.08, z), paint, (step * (k - bars / 2), 0, 0.1)) for k in range(bars)]
        )

    # Small things.

    def carton(self) -> Mesh:
        """A box with a picture on its sides, or a plain one."""
        size = np.exp(self.rng.uniform(math.log(0.04), math.log(0.4), 3))
        return box(size, self.picture() if self.rng.random() < 0.65 else self.material())

    def book(self) -> Mesh:
        """A lying book, or a pile of them."""
        u, level, parts = self.rng.uniform, 0.0, []
        for _ in range(int(self.rng.integers(1, 5)) if u() < 0.5 else 1):
            size = u(0.12, 0.24), u(0.16, 0.32), u(0.01, 0.05)
            cover = self.picture(gloss=float(u(0, 0.3))) if u() < 0.75 else self.material("plain")
            parts.append(box(size, cover).moved((u(-0.02, 0.02), u(-0.02, 0.02), level), u(-0.4, 0.4)))
            level += size[2]
        return joined(parts)

    def paper(self) -> Mesh:
        """A sheet of paper or a magazine."""
        x, y = self.rng.choice([[0.105, 0.15], [0.15, 0.105], [0.07, 0.1]])
        return quad([(-x, -y, 2e-3), (x, -y, 2e-3), (x, y, 2e-3), (-x, y, 2e-3)], self.picture())

    def vessel(self) -> Mesh:
        """A can, bottle, mug, bowl, plate, or vase."""
        u = self.rng.uniform
        outline = self.rng.choice(len(OUTLINES))
        profile = np.array(OUTLINES[outline]) * [u(0.8, 1.25), u(0.8, 1.25)]
        kind = self.rng.random()
        look = self.picture(gloss=0.3) if kind < 0.4 else self.material("plain" if kind < 0.8 else None)
        return lathed(profile, replace(look, gloss=max(look.gloss, 0.25)) if kind < 0.8 else look)

    def ball(self) -> Mesh:
        """A ball, or a lump."""
        radius, bump = self.rng.uniform(0.03, 0.16), self.rng.choice([0.0, 0.0, 0.15])
        turn, rise = np.meshgrid(np.linspace(0, 2 * math.pi, 41), np.linspace(-math.pi / 2, math.pi / 2, 21))
        r = radius * (1 + bump * noise(64, self.rng, 2, 4)[:21, :41])
        r[:, -1], r[0], r[-1] = r[:, 0], r[0].mean(), r[-1].mean()
        points = np.stack(
            [r * np.cos(rise) * np.cos(turn), r * np.cos(rise) * np.sin(turn), r * np.sin(rise)], -1
        )
        return sheet(points, self.material()).standing()

    def monitor(self) -> Mesh:
        """A screen on a foot, which shows a picture at +y or is dark."""
        u = self.rng.uniform
        x = u(0.35, 0.7)
        y, shell = x * u(0.55, 0.68), self.material("plain")
        parts = [
            box((0.2, 0.16, 0.015), shell),
            box((0.05, 0.03, 0.15), shell),
            box((x, 0.035, y), shell, (0, 0, 0.1)),
        ]
        screen = self.picture(emission=1.2) if u() < 0.5 else Material(tint=(0.02, 0.02, 0.02), gloss=0.4)
        h, w = 0.018, x / 2 - 0.015
        low, high = 0.115, 0.085 + y
        return joined([*parts, quad([(w, h, low), (-w, h, low), (-w, h, high), (w, h, high)], screen)])

    def small(self) -> Mesh:
        """Any small thing."""
        return self._any(SMALL)

    def large(self) -> Mesh:
        """Any piece of furniture."""
        return self._any(LARGE)

    def _any(self, makers: dict[Callable[[Maker], Mesh], float]) -> Mesh:
        weights = np.array(list(makers.values()))
        return list(makers)[self.rng.choice(len(weights), p=weights / weights.sum())](self)

    def rug(self) -> Mesh:
        """A carpet."""
        x, y = self.rng.uniform(0.5, 1.6), self.rng.uniform(0.4, 1.1)
        kind = self.rng.choice(["weave", "photo", "stripes", "plain", "mottled"])
        return box((2 * x, 2 * y, 0.008), self.material(str(kind)))

    def framed_picture(self) -> Mesh:
        """A poster, or a picture in a frame, whose face is at +y."""
        look = self.picture(gloss=float(self.rng.choice([0, 0, 0.3])))
        half = self.rng.uniform(0.12, 0.65)
        w, h = half * min(1, look.texture.aspect), half * min(1, 1 / look.texture.aspect)
        face = quad([(w, 0.01, -h), (-w, 0.01, -h), (-w, 0.01, h), (w, 0.01, h)], look)
        if self.rng.random() < 0.5:
            return face
        edge, frame = self.rng.uniform(0.015, 0.05), Material(tint=colour(self.rng), gloss=0.2)
        sides = [((2 * (w + edge), 0.03, edge), (0, 0.005, z)) for z in (-h - edge, h)]
        sides += [((edge, 0.03, 2 * h), (a * (w + edge / 2), 0.005, -h)) for a in (-1, 1)]
        return joined([face, *(box(size, frame, foot) for size, foot in sides)])


def _tilt(angle: float) -> np.ndarray:
    """(3, 3) a turn about the x axis by radians."""
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[1, 0, 0], [0, c, -s], [0, s, c]])


OUTLINES = (  # radii and heights in metres, from below
    [(0, 0), (0.035, 0), (0.035, 0.12), (0, 0.121)],
    [(0, 0), (0.037, 0), (0.038, 0.17), (0.014, 0.23), (0.014, 0.29), (0, 0.291)],
    [(0, 0), (0.04, 0), (0.042, 0.09), (0.037, 0.088), (0.034, 0.01), (0, 0.01)],
    [(0, 0), (0.04, 0), (0.11, 0.07), (0.105, 0.07), (0.04, 0.008), (0, 0.008)],
    [(0, 0), (0.08, 0.002), (0.125, 0.02), (0.08, 0.006), (0, 0.005)],
    [(0, 0), (0.05, 0), (0.08, 0.1), (0.07, 0.18), (0.03, 0.25), (0.045, 0.29), (0.03, 0.27), (0, 0.26)],
)
LARGE = {Maker.table: 3, Maker.chair: 2, Maker.shelf: 2, Maker.cabinet: 3, Maker.sofa: 1.5, Maker.plant: 1,
         Maker.floor_lamp: 0.7, Maker.radiator: 0.6}  # fmt: skip
SMALL = {Maker.carton: 3, Maker.book: 3, Maker.paper: 1.5, Maker.vessel: 4, Maker.ball: 0.8, Maker.plant: 0.6,
         Maker.monitor: 0.8}  # fmt: skip
