"""The furniture of worlds (GLB files): every object a mesh that stands at the origin, with its textures."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import trimesh

from tracing.meshes import PLAIN, Material, Mesh, Texture, joined

WORLDS = ("small_house", "hospital", "warehouse")  # bookstore is kept for validation
LARGEST_TEXTURE = 640
SMALLEST, LARGEST, SMALL = 0.1, 2.55, 0.48  # metres; below the last one an object stands on tables
LEFT_OUT = re.compile("Wall|Ground|Floor|ramp|Carpet|Handle|RoomWindow|LightC|Rangehood|elevator|Lamp_")
ON_WALLS = re.compile("(?<!Desk)Portrait|TV_|Curtain|Door|AirconditionerA|Board")
ON_CEILINGS = re.compile("Chandelier")


@dataclass(frozen=True, eq=False)
class Piece:
    """An object of the library; `place` is where it belongs: floor, small (on tables), wall or ceiling."""

    name: str
    mesh: Mesh
    place: str


@dataclass(frozen=True, eq=False)
class Library:
    """All pieces, and the worlds as they are."""

    pieces: list[Piece]
    worlds: dict[str, list[Mesh]]

    def at(self, place: str) -> list[Piece]:
        """The pieces that belong somewhere."""
        return [piece for piece in self.pieces if piece.place == place]


def load_library(folder: Path) -> Library:
    """The three training worlds of a folder."""
    pieces, worlds, seen = [], {}, set()
    for name in WORLDS:
        scene = trimesh.load(folder / f"{name}.glb")
        textures: dict[int, Texture] = {}
        worlds[name] = []
        for key, nodes in _objects(scene).items():
            mesh = joined([_read_node(scene, node, textures) for node in nodes])
            worlds[name].append(mesh)
            kind = tuple(sorted(scene.graph[node][1] for node in nodes))
            if kind not in seen and SMALLEST < mesh.extent.max() < LARGEST and not LEFT_OUT.search(key):
                pieces.append(Piece(key, mesh.standing(), _place(key, mesh)))
            seen.add(kind)
    return Library(pieces, worlds)


def _objects(scene: trimesh.Scene) -> dict[str, list[str]]:
    """Nodes of geometry by the object that they are parts of."""
    parents, found = scene.graph.transforms.parents, defaultdict(list)
    for node in scene.graph.nodes_geometry:
        parent = parents.get(node)
        is_whole = parent in ("world", "z_up_to_y_up") or parents.get(parent) is None
        found[node if is_whole else parent].append(node)
    return found


def _place(name: str, mesh: Mesh) -> str:
    if ON_CEILINGS.search(name):
        return "ceiling"
    if ON_WALLS.search(name):
        return "wall"
    return "small" if mesh.extent.max() < SMALL and "Trash" not in name else "floor"


def _read_node(scene: trimesh.Scene, node: str, textures: dict[int, Texture]) -> Mesh:
    """A node's triangles in the world, z up instead of the format's y."""
    matrix, name = scene.graph[node]
    geometry = scene.geometry[name]
    upright = np.array([[1, 0, 0], [0, 0, -1], [0, 1, 0.0]])
    linear = upright @ matrix[:3, :3]
    points = geometry.vertices @ linear.T + upright @ matrix[:3, 3]
    normals = geometry.vertex_normals @ np.linalg.inv(linear)
    normals = normals / np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-9)
    uv = getattr(geometry.visual, "uv", None)
    uv = np.zeros((len(points), 2)) if uv is None else uv
    faces, material = geometry.faces, getattr(geometry.visual, "material", None)
    read = _read_material(material, textures)
    return Mesh(points[faces], normals[faces], uv[faces], np.zeros(len(faces), int), [read])


def _read_material(material: object, textures: dict[int, Texture]) -> Material:
    picture = getattr(material, "baseColorTexture", None)
    factor = getattr(material, "baseColorFactor", None)
    tint = (np.array([255, 255, 255] if factor is None else factor[:3]) / 255.0).clip(0.02, 0.9)
    if picture is None:
        return Material(PLAIN, tuple(tint.tolist()))
    if id(picture) not in textures:
        picture.thumbnail((LARGEST_TEXTURE, LARGEST_TEXTURE))
        textures[id(picture)] = Texture(np.array(picture.convert("RGB")))
    return Material(textures[id(picture)], tuple(tint.tolist()))
