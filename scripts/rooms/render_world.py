"""Random furniture, materials, posters, clutter, lights and exposure, for `render_views.py`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import bpy
import cv2
import numpy as np
from mathutils import Matrix, Vector

if TYPE_CHECKING:
    from render_views import Camera, World

FURNITURE = (0.15, 2.2)  # metres; larger objects are walls, smaller ones are left alone
POSTERS, CLUTTER, PANORAMA_LIGHT = (
    (25, 60),
    (20, 50),
    {"day": 1.0, "mixed": 0.4, "lamps": 0.06, "night": 0.02},
)


def furnish(world: World, photos: list[Path], rng: np.random.Generator) -> None:
    """Move, rotate and remove furniture, add posters and clutter."""
    for thing in [o for o in bpy.context.scene.objects if o.type == "MESH"]:
        _move(thing, rng)
    if rng.random() < 0.7:
        _add_ceiling(world, rng)
    for _ in range(int(rng.integers(*POSTERS))):
        _hang_poster(world, photos, rng)
    for _ in range(int(rng.integers(*CLUTTER))):
        _put_down(world, photos, rng)
    bpy.context.view_layer.update()


def _move(thing: bpy.types.Object, rng: np.random.Generator) -> None:
    """Move and rotate an object of the size of furniture, or leave or remove it."""
    corners = np.array([thing.matrix_world @ Vector(c) for c in thing.bound_box])
    extent = corners.max(0) - corners.min(0)
    if not FURNITURE[0] < extent.max() < FURNITURE[1] or rng.random() < 0.4:
        return
    if rng.random() < 0.12:
        bpy.data.objects.remove(thing)
        return
    middle = Vector(corners.mean(0))
    shift = Vector((*rng.normal(0, 0.3, 2).tolist(), 0.0))
    turn = Matrix.Rotation(float(rng.normal(0, 0.6)), 4, "Z")
    thing.matrix_world = (
        Matrix.Translation(middle + shift) @ turn @ Matrix.Translation(-middle) @ thing.matrix_world
    )


def _add_ceiling(world: World, rng: np.random.Generator) -> None:
    """A plain ceiling over worlds that have none; `light_up` lets daylight through."""
    if any(word in o.name.lower() for o in bpy.context.scene.objects for word in ("ceil", "roof")):
        return
    middle, extent = (world.low + world.high) / 2, world.high - world.low
    bpy.ops.mesh.primitive_plane_add(location=(middle[0], middle[1], float(world.high[2])))
    ceiling = bpy.context.active_object
    ceiling.name, ceiling.scale = "ceiling", (extent[0] / 2, extent[1] / 2, 1.0)
    ceiling.data.materials.append(_any_material([], 1.0, rng))


def _free_point(world: World, rng: np.random.Generator) -> np.ndarray | None:
    for _ in range(100):
        point = np.append(rng.uniform(world.low[:2], world.high[:2]), world.low[2] + rng.uniform(0.8, 1.8))
        if world.is_free(point):
            return point
    return None


def _hang_poster(world: World, photos: list[Path], rng: np.random.Generator) -> None:
    """A photo on the wall that a random horizontal ray hits."""
    point = _free_point(world, rng)
    if point is None:
        return
    yaw = rng.uniform(0, 2 * math.pi)
    hit, normal, _, distance = world.tree.ray_cast(
        Vector(point), Vector((math.cos(yaw), math.sin(yaw), rng.normal(0, 0.15)))
    )
    if hit is None or distance > 8 or abs(normal.z) > 0.2:
        return
    if normal.dot(Vector(point) - hit) < 0:
        normal = -normal
    photo = photos[rng.integers(len(photos))]
    height, width = cv2.imread(str(photo)).shape[:2]
    half = rng.uniform(0.12, 0.7) / max(width, height)
    across = Vector((0, 0, 1)).cross(normal).normalized() * width * half
    up = normal.cross(across).normalized() * height * half
    middle = hit + normal * 0.012
    corners = [middle - across - up, middle + across - up, middle + across + up, middle - across + up]
    mesh = bpy.data.meshes.new("poster")
    mesh.from_pydata([tuple(c) for c in corners], [], [(0, 1, 2, 3)])
    layer = mesh.uv_layers.new()
    for loop, uv in zip(layer.data, ((0, 0), (1, 0), (1, 1), (0, 1)), strict=True):
        loop.uv = uv
    mesh.materials.append(_photo_material(photo, rng, boxed=False))
    bpy.context.scene.collection.objects.link(bpy.data.objects.new("poster", mesh))


def _put_down(world: World, photos: list[Path], rng: np.random.Generator) -> None:
    """A box, ball, cylinder, ring or lump on the surface below a random point."""
    point = _free_point(world, rng)
    if point is None:
        return
    hit = world.tree.ray_cast(Vector(point), Vector((*rng.normal(0, 0.5, 2).tolist(), -1.0)))[0]
    if hit is None:
        return
    size = float(np.exp(rng.uniform(math.log(0.06), math.log(0.6))))
    turn = (
        (0.0, 0.0, float(rng.uniform(0, 6))) if rng.random() < 0.7 else tuple(rng.uniform(0, 6, 3).tolist())
    )
    kind = rng.choice(["cube", "cube", "uv_sphere", "cylinder", "torus", "ico_sphere", "cone"])
    options = {"subdivisions": 4} if kind == "ico_sphere" else {}
    getattr(bpy.ops.mesh, f"primitive_{kind}_add")(location=tuple(hit), rotation=turn, **options)
    thing = bpy.context.active_object
    thing.name = "clutter"
    thing.scale = tuple((size / 2 * rng.uniform(0.4, 1.4, 3)).tolist())
    if kind == "ico_sphere":  # a lump
        modifier = thing.modifiers.new("lump", "DISPLACE")
        modifier.texture = bpy.data.textures.new("lump", "CLOUDS")
        modifier.texture.noise_scale, modifier.strength = float(rng.uniform(0.2, 0.9)), 0.8
    thing.location.z += thing.scale.z * 0.9
    thing.data.materials.append(_any_material(photos, 0.3, rng))


def dress(photos: list[Path], rng: np.random.Generator) -> None:
    """Replace many of the materials by plain ones or photos, and vary the gloss."""
    for thing in bpy.context.scene.objects:
        if thing.type != "MESH" or thing.name.startswith(("poster", "clutter")):
            continue
        for slot in thing.material_slots:
            if rng.random() < 0.55:
                slot.material = _any_material(photos, 0.45, rng)
    for material in bpy.data.materials:
        node = material.node_tree.nodes.get("Principled BSDF") if material.node_tree else None
        if node:
            node.inputs["Roughness"].default_value = float(rng.uniform(0.25, 0.95))


def _any_material(photos: list[Path], plain: float, rng: np.random.Generator) -> bpy.types.Material:
    if rng.random() > plain:
        return _photo_material(photos[rng.integers(len(photos))], rng, boxed=True)
    material, node = _material()
    level = rng.uniform(0.04, 0.8)
    colour = (level * rng.uniform(0.75, 1.2, 3)).clip(0, 0.9)
    node.inputs["Base Color"].default_value = (*colour.tolist(), 1.0)
    return material


def _material() -> tuple[bpy.types.Material, bpy.types.Node]:
    material = bpy.data.materials.new("dressed")
    material.use_nodes = True
    return material, material.node_tree.nodes["Principled BSDF"]


def _photo_material(photo: Path, rng: np.random.Generator, *, boxed: bool) -> bpy.types.Material:
    """A photo as a texture, by UV coordinates or by box projection."""
    material, surface = _material()
    nodes, links = material.node_tree.nodes, material.node_tree.links
    image = nodes.new("ShaderNodeTexImage")
    image.image = bpy.data.images.load(str(photo), check_existing=True)
    if boxed:
        coordinates, mapping = nodes.new("ShaderNodeTexCoord"), nodes.new("ShaderNodeMapping")
        image.projection, image.projection_blend, image.extension = "BOX", 0.05, "MIRROR"
        mapping.inputs["Location"].default_value = tuple(rng.uniform(-3, 3, 3).tolist())
        mapping.inputs["Rotation"].default_value = (0, 0, float(rng.choice([0, rng.uniform(0, 6)])))
        mapping.inputs["Scale"].default_value = (1 / float(np.exp(rng.uniform(-1.0, 0.9))),) * 3
        links.new(coordinates.outputs["Object"], mapping.inputs["Vector"])
        links.new(mapping.outputs["Vector"], image.inputs["Vector"])
    links.new(image.outputs["Color"], surface.inputs["Base Color"])
    return material


def light_up(tree: object, anchor: Camera, panoramas: list[Path], rng: np.random.Generator) -> str:
    """Replace all lights by a panorama and, unless by day, lamps below ceilings; returns their kind."""
    scene = bpy.context.scene
    for thing in [o for o in scene.objects if o.type == "LIGHT"]:
        bpy.data.objects.remove(thing)
    kind = str(rng.choice(["day", "mixed", "lamps", "night"], p=[0.3, 0.3, 0.25, 0.15]))
    sky = bpy.data.worlds.new("sky")
    sky.use_nodes = True
    nodes, links = sky.node_tree.nodes, sky.node_tree.links
    panorama, mapping, coordinates = (
        nodes.new(f"ShaderNode{n}") for n in ("TexEnvironment", "Mapping", "TexCoord")
    )
    panorama.image = bpy.data.images.load(str(panoramas[rng.integers(len(panoramas))]), check_existing=True)
    mapping.inputs["Rotation"].default_value = (0, 0, float(rng.uniform(0, 6.28)))
    links.new(coordinates.outputs["Generated"], mapping.inputs["Vector"])
    links.new(mapping.outputs["Vector"], panorama.inputs["Vector"])
    links.new(panorama.outputs["Color"], nodes["Background"].inputs["Color"])
    nodes["Background"].inputs["Strength"].default_value = PANORAMA_LIGHT[kind] * float(rng.uniform(0.6, 1.5))
    scene.world = sky
    for thing in scene.objects:  # daylight passes through roofs, otherwise closed rooms would be black
        if thing.type == "MESH" and any(word in thing.name.lower() for word in ("ceil", "roof")):
            thing.visible_shadow = thing.visible_diffuse = kind in ("night", "lamps")
    for _ in range({"day": 0, "mixed": 3, "lamps": 5, "night": 2}[kind]):
        _hang_lamp(tree, anchor, rng)
    return kind


def _hang_lamp(tree: object, anchor: Camera, rng: np.random.Generator) -> None:
    """A lamp below the ceiling, above a point that the anchor looks at."""
    x, y, _ = anchor.centre + anchor.rotation[2] * rng.uniform(0, 3) + rng.uniform(-2.5, 2.5, 3)
    start = Vector((x, y, float(anchor.centre[2])))
    hit = tree.ray_cast(start, Vector((0, 0, 1)), 4.0)[0]
    height = (hit.z if hit else start.z + 1.5) - 0.15
    data = bpy.data.lights.new("lamp", "AREA" if rng.random() < 0.5 else "POINT")
    if data.type == "AREA":
        data.shape, data.size = "DISK", float(rng.uniform(0.1, 1.0))
    else:
        data.shadow_soft_size = float(rng.uniform(0.02, 0.15))
    data.energy = float(rng.uniform(20, 100))
    data.color = tuple((1 - rng.uniform(0, 0.5) * np.array([0, 0.4, 1])).tolist())
    lamp = bpy.data.objects.new("lamp", data)
    lamp.location, lamp.visible_camera = (float(x), float(y), max(float(height), 1.4)), False
    bpy.context.scene.collection.objects.link(lamp)


def develop(light: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(H, W, 3) uint8 blue, green, red: exposure, white balance, tone curve, blur and sensor noise."""
    light = np.nan_to_num(light.clip(0, 1e3))
    grey = light.mean(-1)
    gain = 0.18 / np.exp(np.log(grey + 1e-4).mean()) * 2 ** rng.normal(0, 0.5)
    gain = min(gain, 2.2 / max(np.percentile(grey, 90), 1e-4))
    average = light.reshape(-1, 3).mean(0) + 1e-6
    white = (average.mean() / average) ** rng.uniform(0.2, 0.9)
    exposed = light * (gain * white).astype(np.float32)
    tone = (1 - np.exp(-exposed)) ** (1 / rng.uniform(1.9, 2.4))
    if rng.random() < 0.15:
        length, turn = int(rng.integers(3, 8)), rng.uniform(0, math.pi)
        kernel = np.zeros((9, 9), np.float32)
        reach = np.array([math.cos(turn), math.sin(turn)]) * length / 2
        cv2.line(
            kernel, np.rint(4 - reach).astype(int).tolist(), np.rint(4 + reach).astype(int).tolist(), 1.0
        )
        tone = cv2.filter2D(tone, -1, kernel / kernel.sum())
    tone = cv2.GaussianBlur(tone, (0, 0), rng.uniform(0.3, 0.9))
    noise = rng.standard_normal(tone.shape, np.float32)
    tone = tone + noise * (rng.uniform(0.002, 0.01) + rng.uniform(0.002, 0.02) * np.sqrt(tone))
    return (tone[..., ::-1] * 255).clip(0, 255).astype(np.uint8)
