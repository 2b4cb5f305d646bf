"""Rooms composed of furniture and clutter, and worlds as they are with more on their walls and tables."""

from __future__ import annotations

import math
from dataclasses import replace

import cv2
import numpy as np

from tracing.cameras import ring
from tracing.furniture import Maker
from tracing.library import Library, Piece
from tracing.meshes import PLAIN, Mesh, Texture, quad
from tracing.shading import Scene
from tracing.shell import Room, add_fixture, build_shell
from tracing.surfaces import draw_material

CELL = 0.05  # metres of the grid that says where the floor is taken


class Floor:
    """Which parts of the floor are taken."""

    def __init__(self, size: np.ndarray) -> None:
        self._taken = np.zeros(np.ceil(size[1::-1] / CELL).astype(int), np.uint8)

    def take(self, mesh: Mesh) -> bool:
        """Take the place of a piece of furniture if it is free; False if not."""
        points = mesh.corners.reshape(-1, 3)[:, :2].astype(np.float32)
        outline = cv2.boxPoints(cv2.minAreaRect(points)) / CELL
        if (outline < 0).any() or (outline > self._taken.shape[::-1]).any():
            return False
        place = cv2.fillPoly(np.zeros_like(self._taken), [np.rint(outline).astype(np.int32)], 1)
        if (place & self._taken).any():
            return False
        self._taken |= place
        return True


class Composer:
    """Draws one room; everything depends on `rng` alone."""

    def __init__(self, library: Library, maker: Maker) -> None:
        self.library, self.maker, self.rng = library, maker, maker.rng

    def compose(self) -> Room:
        """A furnished room."""
        rng = self.rng
        size = np.array([rng.uniform(2.5, 8), rng.uniform(2.5, 8), rng.uniform(2.3, 3.2)])
        if rng.random() < 0.6:  # most rooms are small
            size[:2] = size[:2] ** 0.8
        room, floor = Room(np.array([0 * size, size])), Floor(size)
        build_shell(room, self.maker, self.library)
        self._furnish(room, floor, size)
        scene = Scene(room.parts)
        self._hang(room, scene, np.zeros(3), size, int(rng.integers(2, 14)))
        self._put_down(room, scene, int(rng.integers(20, 70)))
        room.spots.append(np.append(size[:2] * rng.choice([0.12, 0.88], 2), rng.uniform(0.3, 1.2)))
        return room

    def _piece(self) -> Mesh:
        """A piece of furniture, of the library or new, as it is or with other materials."""
        rng = self.rng
        if rng.random() < 0.5:
            return self.maker.large()
        pieces = self.library.at("floor")
        return self._varied(pieces[rng.integers(len(pieces))])

    def _varied(self, piece: Piece) -> Mesh:
        """A piece of the library, a little larger or smaller, and often in other colours."""
        rng, mesh = self.rng, piece.mesh
        mesh = mesh.scaled(rng.uniform(0.85, 1.12) * rng.uniform(0.93, 1.07, 3))
        if rng.random() < 0.3:
            return mesh.painted(*(self.maker.material() for _ in mesh.materials))
        tint, order = np.ones(3), np.arange(3)
        if rng.random() < 0.5:
            tint, order = rng.uniform(0.4, 1.3, 3), rng.permutation(3)
        gloss, shine = float(rng.choice([0.0, rng.uniform(0.05, 0.5)])), float(rng.uniform(15, 150))
        materials = []
        for material in mesh.materials:
            colours = tuple((np.array(material.tint) * tint).clip(0.02, 1.1).tolist())
            texture = material.texture
            if texture is not PLAIN and (order != [0, 1, 2]).any():
                texture = Texture(texture.levels[0][..., order])  # other hues
            materials.append(replace(material, texture=texture, tint=colours, gloss=gloss, shininess=shine))
        return mesh.painted(*materials)

    def _furnish(self, room: Room, floor: Floor, size: np.ndarray) -> None:
        """Tables with chairs, furniture along the walls and elsewhere, some of it several times."""
        rng = self.rng
        wanted = int(rng.integers(6, 7 + min(18, size[0] * size[1])))
        if rng.random() < 0.65:
            self._set_table(room, floor, size)
        again: list[Mesh] = []
        placed = 0
        for _ in range(4 * wanted):
            mesh = again.pop() if again else self._piece()
            if self._place(room, floor, mesh, size, along_wall=rng.random() < 0.65):
                placed += 1
                if not again and rng.random() < 0.12:
                    again = [mesh] * int(rng.integers(1, 4))
            if placed >= wanted:
                break
        for _ in range(int(rng.integers(0, 3))):
            rug = self.maker.rug().moved(
                np.append(rng.uniform(0.3, 0.7, 2) * size[:2], 0), rng.uniform(0, 6.3)
            )
            if (rug.low[:2] > 0).all() and (rug.high[:2] < size[:2]).all():
                room.parts.append(rug)

    def _place(self, room: Room, floor: Floor, mesh: Mesh, size: np.ndarray, *, along_wall: bool) -> bool:
        """Put a piece somewhere on the floor where it fits; False if it does not."""
        rng = self.rng
        for _ in range(6):
            if along_wall:
                side = int(rng.integers(4))
                turned = mesh.moved((0, 0, 0), side * math.pi / 2 + rng.normal(0, 0.03))
                gap = turned.extent[:2] / 2 + rng.uniform(0.01, 0.1)
                x, y = rng.uniform(gap, np.maximum(size[:2] - gap, gap))
                x, y = [(x, gap[1]), (size[0] - gap[0], y), (x, size[1] - gap[1]), (gap[0], y)][side]
            else:
                turned = mesh.moved((0, 0, 0), rng.uniform(0, 2 * math.pi))
                x, y = rng.uniform(0.2, 0.8, 2) * size[:2]
            middle = (turned.low + turned.high) / 2
            moved = turned.moved((x - middle[0], y - middle[1], 0))
            if moved.high[2] < size[2] and floor.take(moved):
                self._add(room, moved)
                return True
        return False

    def _add(self, room: Room, mesh: Mesh) -> None:
        low, high = mesh.low, mesh.high
        room.parts.append(mesh)
        room.spots.append(np.append((low[:2] + high[:2]) / 2, min(low[2] + 0.75 * (high[2] - low[2]), 1.2)))

    def _set_table(self, room: Room, floor: Floor, size: np.ndarray) -> None:
        """A table with equal chairs around it."""
        rng = self.rng
        names = {piece.name: piece for piece in self.library.at("floor")}
        table = self.maker.table() if rng.random() < 0.6 else self._varied(names["KitchenTable_01_001"])
        chair = self.maker.chair()
        if rng.random() < 0.4:
            chair = self._varied(names[str(rng.choice(["ChairA_01_005", "ChairD_01_003"]))])
        yaw, middle = rng.uniform(0, 6.3), np.append(rng.uniform(0.35, 0.65, 2) * size[:2], 0)
        if not floor.take(table.moved(middle, yaw)):
            return
        self._add(room, table.moved(middle, yaw))
        room.spots += [room.spots[-1]] * 3  # tables are looked at more often
        half = table.extent[:2] / 2
        for side in range(4):
            across, along = (half[1], half[0]) if side % 2 == 0 else (half[0], half[1])
            for place in [0.0] if along < 0.55 else [-0.5 * along, 0.5 * along]:
                if rng.random() < 0.25:
                    continue
                seat = chair.moved((0, 0, 0), math.pi + rng.normal(0, 0.25))  # its back away from the table
                seat = seat.moved((place, -across - 0.3 - rng.uniform(0, 0.15), 0))
                seat = seat.moved((0, 0, 0), side * math.pi / 2).moved(middle, yaw)
                if floor.take(seat):
                    self._add(room, seat)

    def _hang(self, room: Room, scene: Scene, low: np.ndarray, high: np.ndarray, count: int) -> None:
        """Pictures and other flat things on walls that horizontal rays hit."""
        rng = self.rng
        points = np.c_[
            rng.uniform(low[:2] + 0.3, high[:2] - 0.3, (count, 2)), low[2] + rng.uniform(0.9, 1.9, count)
        ]
        turn = rng.uniform(0, 2 * math.pi, count)
        directions = np.stack([np.cos(turn), np.sin(turn), 0 * turn], -1)
        hits = scene.cast(points, directions)
        for point, direction, distance, triangle in zip(
            points, directions, hits["tfar"], hits["primID"], strict=True
        ):
            if triangle < 0 or distance > 8 or abs(scene.facing[triangle][2]) > 0.1:
                continue
            normal = scene.facing[triangle] * -np.sign(scene.facing[triangle] @ direction)
            mesh = self._flat_thing()
            yaw = math.atan2(normal[1], normal[0]) - math.pi / 2
            place = point + distance * direction + 0.004 * normal
            if self._fits(scene, place, normal, mesh):
                room.parts.append(mesh.moved(place, yaw))

    def _flat_thing(self) -> Mesh:
        """Something for a wall, its back at y = 0 and its middle at z = 0."""
        rng = self.rng
        if rng.random() < 0.75:
            return self.maker.framed_picture()
        pieces = [piece for piece in self.library.at("wall") if piece.mesh.extent.max() < 1.5]
        mesh = self._varied(pieces[rng.integers(len(pieces))])
        if mesh.extent[0] < mesh.extent[1]:
            mesh = mesh.moved((0, 0, 0), math.pi / 2)
        area = np.cross(mesh.corners[:, 1] - mesh.corners[:, 0], mesh.corners[:, 2] - mesh.corners[:, 0])
        if area.sum(0)[1] < 0:  # what is seen faces +y
            mesh = mesh.moved((0, 0, 0), math.pi)
        return mesh.moved((0, -mesh.low[1], -mesh.extent[2] / 2))

    @staticmethod
    def _fits(scene: Scene, place: np.ndarray, normal: np.ndarray, mesh: Mesh) -> bool:
        """Whether the wall is flat and free behind the whole of a flat thing."""
        across = np.cross([0, 0, 1.0], normal)
        w, h = mesh.extent[0] / 2, mesh.extent[2] / 2
        corners = [place + a * w * across + b * h * np.array([0, 0, 1.0]) for a in (-1, 1) for b in (-1, 1)]
        away = np.array(corners) + 0.25 * normal
        return bool(np.abs(scene.distances(away, np.tile(-normal, (4, 1))) - 0.254).max() < 0.02)

    def _put_down(self, room: Room, scene: Scene, count: int) -> None:
        """Small things on tables and other surfaces, and some on the floor, none inside another."""
        rng = self.rng
        tops = [spot for spot in room.spots if 0.25 < spot[2] < 1.4] or room.spots
        taken = np.zeros((0, 4))  # middle and radius
        again: Mesh | None = None
        for _ in range(4 * count):
            mesh = again if again is not None else self._small()
            start = tops[rng.integers(len(tops))] + [*rng.normal(0, 0.35, 2), rng.uniform(0.3, 0.9)]
            moved = _dropped(scene, mesh.moved((0, 0, 0), rng.uniform(0, 6.3)), start)
            if moved is None:
                continue
            ball = np.append((moved.low + moved.high) / 2, np.linalg.norm(moved.extent[:2]) / 2)
            if (np.linalg.norm(taken[:, :3] - ball[:3], axis=1) < 0.85 * (taken[:, 3] + ball[3])).any():
                continue
            taken = np.vstack([taken, ball])
            again = mesh if rng.random() < 0.2 else None
            room.parts.append(moved)
            if len(taken) == count:
                break
        chosen = rng.permutation(len(taken))[: len(taken) // 4]
        room.spots += [taken[number, :3] for number in chosen if taken[number, 2] < 1.3]

    def _small(self) -> Mesh:
        pieces = self.library.at("small")
        if self.rng.random() < 0.3:
            return self._varied(pieces[self.rng.integers(len(pieces))])
        return self.maker.small()

    def visit(self) -> Room:
        """One of the worlds as it is, with lamps, pictures and clutter around a few free places."""
        rng = self.rng
        names = list(self.library.worlds)
        parts = self.library.worlds[names[rng.integers(len(names))]]
        scene = Scene(parts)
        low, high = np.quantile(scene.corners.reshape(-1, 3), [0.002, 0.998], axis=0)
        room = Room(np.array([low, high]), list(parts))
        if rng.random() < 0.5:
            material = draw_material(rng, self.maker.photos, "walls")
            z = high[2] + 0.05
            room.parts.append(
                quad([(low[0], high[1], z), (*high[:2], z), (high[0], low[1], z), (*low[:2], z)], material)
            )
        for _ in range(400):
            point = np.append(rng.uniform(low[:2], high[:2]), max(low[2], 0) + 1.3)
            around = scene.distances(point, ring(16))
            if np.isfinite(around).sum() < 12 or around.min() < 0.3 or np.median(around) > 7:
                continue
            up, down = scene.distances(point, np.array([[0, 0, 1.0], [0, 0, -1.0]]))
            if not 0.5 < down < 2:
                continue
            lamp = point + np.array([0, 0, min(up, rng.uniform(1.3, 2.0)) - 0.01])
            add_fixture(room, lamp, rng, self.library)
            reach = float(min(np.median(around), 2.5))
            box_around = np.array([[-reach, -reach, -1.3], [reach, reach, 1.0]]) + point
            self._hang(room, scene, *box_around, 6)
            shifts = [[*rng.normal(0, 0.4 * reach, 2), rng.uniform(-1, 0)] for _ in range(3)]
            room.spots += list(np.array(shifts) + point)
            if len(room.fixtures) == 4:
                break
        self._put_down(room, scene, int(rng.integers(20, 50)))
        return room


def _dropped(scene: Scene, mesh: Mesh, start: np.ndarray) -> Mesh | None:
    """A thing on the surface below a point; None where that is uneven or too small."""
    half = 0.4 * mesh.extent[:2]
    feet = start + np.array([[0, 0, 0], *([a * half[0], b * half[1], 0] for a in (-1, 1) for b in (-1, 1))])
    below = scene.distances(feet, np.tile([0, 0, -1.0], (5, 1)))
    if not np.isfinite(below).all() or np.ptp(below) > 0.02:
        return None
    return mesh.moved(start - [0, 0, below[0] - 1e-3])
