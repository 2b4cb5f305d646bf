"""Photometric augmentation: random changes of lighting, blur, sensor noise and compression.

`degrade` is for evaluation: its strength is a level of difficulty. `augment`, `capture` and `darken` are for
training, on grey images.
"""

from __future__ import annotations

import cv2
import numpy as np

LUMA = np.array([0.114, 0.587, 0.299], np.float32)  # weights of blue, green and red in a grey image


def draw_grey_weights(rng: np.random.Generator, random_share: float, concentration: float = 1) -> np.ndarray:
    """(3,) float32 weights of blue, green and red: `LUMA`, or random ones in `random_share` of the cases.

    Args:
        rng: the source of randomness.
        random_share: from 0 to 1.
        concentration: of the symmetric Dirichlet distribution of random weights; larger is closer to equal.
    """
    return rng.dirichlet((concentration,) * 3).astype(np.float32) if rng.random() < random_share else LUMA


def to_grey(colour: np.ndarray, weights: np.ndarray = LUMA) -> np.ndarray:
    """(H, W) uint8 from (H, W, 3) uint8 blue, green, red, by their weights (3,)."""
    return cv2.transform(colour, weights[None])


def degrade(pixels: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Photometric augmentation of (H, W[, 3]) uint8: gain, gamma, shading gradient, blur, noise and JPEG."""
    height, width = pixels.shape[:2]
    gain, gamma = 1 + 0.35 * strength * rng.uniform(-1, 1), 2 ** (0.6 * strength * rng.uniform(-1, 1))
    direction, depth = rng.uniform(0, 2 * np.pi), 0.4 * strength * rng.random()
    blur, noise = 1.2 * strength * rng.random(), 8 * strength * rng.random()
    quality = round(95 - 40 * strength * rng.random())
    x, y = np.linspace(-0.5, 0.5, width), np.linspace(-0.5, 0.5, height)[:, None]
    shading = 1 - depth * (0.5 + x * np.cos(direction) + y * np.sin(direction))
    shading = shading.astype(np.float32) if pixels.ndim == 2 else shading.astype(np.float32)[..., None]
    light = (pixels.astype(np.float32) / 255) ** np.float32(gamma) * np.float32(255 * gain) * shading
    if blur > 0.2:
        light = cv2.GaussianBlur(light, (0, 0), blur)
    light += rng.standard_normal(light.shape, dtype=np.float32) * np.float32(noise)
    view = np.clip(np.rint(light), 0, 255).astype(np.uint8)
    return _compressed(view, quality)


def augment(grey: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A photometrically changed copy of (H, W) uint8: tone, shading, blur, noise, compression."""
    image = grey.astype(np.float32) / 255
    if rng.random() < 0.7:
        image = _tone(image, rng)
    if rng.random() < 0.4:
        image = image * _shading(image.shape, rng)
    if rng.random() < 0.35:
        image = _blur(image, rng)
    if rng.random() < 0.5:
        image = image + rng.normal(0, rng.uniform(0.003, 0.04), image.shape).astype(np.float32)
    stored = (image.clip(0, 1) * 255).astype(np.uint8)
    return _compressed(stored, int(rng.integers(25, 95))) if rng.random() < 0.5 else stored


def capture(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(H, W) uint8 as a phone would take and store it: lens, exposure, motion blur, noise, compression.

    Every image gets sensor noise, as no surface is perfectly plain in a photo.
    """
    image = pixels.astype(np.float32) / 255
    if rng.random() < 0.4:
        image = _blur(image, rng)
    if rng.random() < 0.5:
        image *= _vignette(image.shape, rng)
    if rng.random() < 0.5:
        image = _tone(image, rng)
    image += _sensor_noise(image, rng)
    stored = (image * 255).clip(0, 255).astype(np.uint8)
    if rng.random() < 0.25:
        stored = cv2.bilateralFilter(stored, 5, rng.uniform(5, 25), 3)  # a camera's own noise reduction
    return _compressed(stored, int(rng.integers(30, 97))) if rng.random() < 0.7 else stored


def _compressed(pixels: np.ndarray, quality: int) -> np.ndarray:
    """(H, W[, 3]) uint8 after JPEG compression."""
    encoded = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
    return cv2.imdecode(encoded, cv2.IMREAD_GRAYSCALE if pixels.ndim == 2 else cv2.IMREAD_COLOR)


def _vignette(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """(h, w) float32: 1 in the middle, darker towards the corners."""
    height, width = shape
    x = np.linspace(-1, 1, width, dtype=np.float32)
    y = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
    return 1 - np.float32(rng.uniform(0.05, 0.35)) * (x * x + y * y) / 2


def _sensor_noise(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Read noise and shot noise, relative to white; sometimes coarser than a pixel."""
    noise = rng.standard_normal(image.shape, np.float32)
    if rng.random() < 0.4:
        noise = cv2.GaussianBlur(noise, (0, 0), rng.uniform(0.5, 1.0)) * 2
    reading, light = np.exp(rng.uniform(np.log(0.002), np.log(0.025), 2)).astype(np.float32)
    return noise * (reading + light * np.sqrt(image.clip(0, 1)))


def darken(grey: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(H, W) uint8 as at another time of day: a steep tone curve, little contrast, sensor noise."""
    image = grey.astype(np.float32) / 255
    image = image ** np.exp(rng.uniform(-1.2, 1.2)) * rng.uniform(0.25, 1) + rng.uniform(0, 0.1)
    image += rng.normal(0, rng.uniform(0.005, 0.05), image.shape).astype(np.float32)
    return (image.clip(0, 1) * 255).astype(np.uint8)


def _tone(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    gamma = np.exp(rng.uniform(-0.7, 0.7))
    contrast, brightness = rng.uniform(0.5, 1.3), rng.uniform(-0.15, 0.15)
    return ((image**gamma - 0.5) * contrast + 0.5 + brightness).clip(0, 1)


def _shading(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """A smooth illumination field, or one shadow with a sharp edge."""
    if rng.random() < 0.6:
        coarse = rng.uniform(0.5, 1.2, (3, 4)).astype(np.float32)
        return cv2.resize(coarse, shape[::-1], interpolation=cv2.INTER_CUBIC)
    field = np.ones(shape, np.float32)
    height, width = shape
    polygon = rng.uniform(-0.3, 1.3, (3, 2)) * (width, height)
    cv2.fillPoly(field, [polygon.astype(np.int32)], float(rng.uniform(0.35, 0.8)))
    return cv2.GaussianBlur(field, (0, 0), rng.uniform(0.5, 6))


def _blur(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if rng.random() < 0.6:
        return cv2.GaussianBlur(image, (0, 0), rng.uniform(0.4, 2.0))
    length = int(rng.integers(3, 12))
    kernel = np.zeros((length, length), np.float32)
    direction = rng.uniform(0, np.pi)
    offset = np.array([np.cos(direction), np.sin(direction)]) * length / 2
    centre = np.array([(length - 1) / 2] * 2)
    start, end = (tuple(round(float(x)) for x in centre + sign * offset) for sign in (-1, 1))
    cv2.line(kernel, start, end, 1.0)
    return cv2.filter2D(image, -1, kernel / kernel.sum())
