"""Front ends whose networks are kornia's: DISK, ALIKED, DeDoDe, XFeat, KeyNet-AffNet-HardNet and DoG-HardNet.

kornia's convenience classes fetch weights when they are built, so networks are put together from its parts
here and come without trained parameters. Their state dictionaries hold what is trained and nothing else.

Pixel conventions. DISK, ALIKED, DoG and XFeat (of an image that it need not resize) count from the centre of
the first pixel as we do. DeDoDe's normalised positions become the pixel whose centre they are. KeyNet
multiplies a pixel's index i on a pyramid level by the level's factor f; its centre is at (i + 0.5) · f − 0.5.
"""

from __future__ import annotations

import torch
from kornia import feature
from kornia.feature.dedode.decoder import ConvRefiner, Decoder
from kornia.feature.dedode.dedode_models import get_descriptor, get_detector
from kornia.feature.dedode.encoder import VGG19
from kornia.feature.dedode.transformer import vit_large
from kornia.feature.dedode.utils import sample_keypoints
from kornia.geometry.subpix import ConvQuadInterp3d
from kornia.geometry.transform import ScalePyramid
from torch import Tensor, nn
from torch.nn.functional import pad

from matcher.config import ExtractorConfig
from matcher.errors import UsageError
from matcher.extract.front_end import Found, FrontEnd, colour, grey, mask_of, padded, strongest
from matcher.types import Image

# The least side, in pixels, at which the networks' coarsest maps still hold more than one value.
_LEAST_SIDE = 64
VARIANTS = ("aliked-n16", "aliked-n16rot", "aliked-n32", "aliked-t16")
_DINO_PATCH = 14


def _device(network: nn.Module) -> torch.device:
    return next(network.parameters()).device


def _trained_only(network: nn.Module) -> nn.Module:
    """Take constant buffers (grids, filters) out of the state dictionary."""
    for module in network.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            for name, buffer in list(module.named_buffers(recurse=False)):
                module.register_buffer(name, buffer, persistent=False)
    return network


def _build_plain(config: ExtractorConfig) -> nn.Module:
    return feature.DISK() if config.kind == "disk" else feature.XFeat()


def _find_disk(network: feature.DISK, image: Image, config: ExtractorConfig) -> Found:
    """DISK (Tyszkiewicz et al. 2020); scores are logits. Maps are cropped before suppression."""
    window = 2 * config.nms_radius + 1
    pixels = padded(colour(image, _device(network)), 1, _LEAST_SIDE)
    (features,) = network(
        pixels, window_size=window, score_threshold=config.score_threshold, pad_if_not_divisible=True
    )
    points, scores = features.keypoints, features.detection_scores
    index = strongest(points, scores, image, config.max_keypoints)
    return Found(points[index], scores[index], features.descriptors[index])


def _build_aliked(config: ExtractorConfig) -> nn.Module:
    if config.variant not in VARIANTS:
        raise UsageError(f"variant {config.variant!r} of aliked is not one of {', '.join(VARIANTS)}")
    how = dict(detection_threshold=config.score_threshold, nms_radius=config.nms_radius)
    return _trained_only(feature.ALIKED(config.variant, **how))


def _find_aliked(network: feature.ALIKED, image: Image, config: ExtractorConfig) -> Found:
    """ALIKED (Zhao et al. 2023); where no point passes the threshold, those above the mean score do."""
    pixels = padded(colour(image, _device(network)), 1, _LEAST_SIDE)
    features, scores = network.extract_dense_map(pixels)
    (normalised,), (scores,), _ = network.dkd(scores)
    last = normalised.new_tensor([pixels.shape[-1] - 1, pixels.shape[-2] - 1])
    points = (normalised + 1) * last / 2
    index = strongest(points, scores, image, config.max_keypoints)
    # Only the points that stay are described; each takes sixteen samples or more.
    (descriptors,), _ = network.desc_head(features, [normalised[index]])
    return Found(points[index], scores[index], descriptors)


def _find_xfeat(network: feature.XFeat, image: Image, config: ExtractorConfig) -> Found:
    """XFeat (Potje et al. 2024), the sparse setting; kornia resizes no image whose sides are 32 times n."""
    pixels = padded(colour(image, _device(network)), 32, _LEAST_SIDE)
    everything = pixels.shape[-1] * pixels.shape[-2]
    (found,) = network.detectAndCompute(pixels, everything, config.score_threshold)
    points, scores = found["keypoints"].float(), found["scores"]
    index = strongest(points, scores, image, config.max_keypoints)
    return Found(points[index], scores[index], found["descriptors"][index])


class DeDoDe(nn.Module):
    """Detector L and descriptor B or G of DeDoDe (Edstedt et al. 2024), with kornia's parameter names."""

    def __init__(self, descriptor: nn.Module) -> None:
        super().__init__()
        self.detector = get_detector("L", torch.float32)
        self.descriptor = descriptor


class VggDino(nn.Module):
    """The encoder of descriptor G: VGG-19 maps at 1 to 1/8 and DINOv2 patch tokens at 1/14 of the resolution,
    whose parameters kornia's own hides."""

    def __init__(self) -> None:
        super().__init__()
        self.vgg = VGG19()
        self.dinov2 = vit_large(
            patch_size=_DINO_PATCH, img_size=518, init_values=1.0, block_chunks=0, drop_path_uniform=True
        )

    def forward(self, pixels: Tensor) -> tuple[list[Tensor], list[tuple[int, int]]]:
        """Maps from fine to coarse, and the height and width of each."""
        maps, sizes = self.vgg(pixels)
        size = (pixels.shape[-2] // _DINO_PATCH, pixels.shape[-1] // _DINO_PATCH)
        tokens = self.dinov2.forward_features(pixels)["x_norm_patchtokens"]
        return [*maps, tokens.mT.unflatten(-1, size)], [*sizes, size]


def _build_dedode(config: ExtractorConfig) -> nn.Module:
    # On the meta device: kornia would draw VGG's 120 million unused parameters as well.
    with torch.device("meta"):
        descriptor = get_descriptor("B", torch.float32)
        if config.kind == "dedodeg":
            refine = {"hidden_blocks": 5, "residual": True}
            coarse = {
                "14": ConvRefiner(1024, 768, 512 + 256, **refine),
                "8": ConvRefiner(512 + 512, 512, 256 + 256, **refine),
            }
            layers = {**coarse, **{name: descriptor.decoder.layers[name] for name in ("4", "2", "1")}}
            descriptor.decoder = Decoder(nn.ModuleDict(layers), num_prototypes=256)
            descriptor.encoder = VggDino()
        network = DeDoDe(descriptor)
    return network.to_empty(device="cpu")


def _find_dedode(network: DeDoDe, image: Image, config: ExtractorConfig) -> Found:
    """The best pixels of a score map thinned where it is dense; no threshold, descriptors not normalised."""
    pixels = padded(colour(image, _device(network)), 1, _LEAST_SIDE)
    height, width = pixels.shape[-2:]
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
    mean, deviation = (pixels.new_tensor(values).view(3, 1, 1) for values in (mean, deviation))
    normalised = (pixels - mean) / deviation
    normalised = pad(normalised, (0, -width % _DINO_PATCH, 0, -height % _DINO_PATCH))
    logits = network.detector(normalised)[:, 0, :height, :width]
    probability = logits.flatten().softmax(dim=0).view_as(logits)
    grid, scores = sample_keypoints(probability, num_samples=None)
    points = ((grid[0] + 1) * grid.new_tensor([width, height]) / 2 - 0.5).round()
    index = strongest(points, scores[0], image, config.max_keypoints)
    x, y = points[index].long().unbind(-1)
    return Found(points[index], scores[0, index], network.descriptor(normalised)[0, :, y, x].T)


def _build_keynet(config: ExtractorConfig) -> nn.Module:
    detector = feature.KeyNetDetector(
        pretrained=False,
        num_features=config.max_keypoints,
        ori_module=feature.LAFOrienter(angle_detector=feature.OriNet(pretrained=False)),
        aff_module=feature.LAFAffNetShapeEstimator(pretrained=False, preserve_orientation=False),
        score_threshold=config.score_threshold,
    )
    describer = feature.LAFDescriptor(feature.HardNet(pretrained=False))
    return _trained_only(feature.LocalFeature(detector, describer))


def _build_doghardnet(config: ExtractorConfig) -> nn.Module:
    detector = feature.ScaleSpaceDetector(
        config.max_keypoints,
        resp_module=feature.BlobDoG(),
        subpix_module=ConvQuadInterp3d(),
        scale_pyr_module=ScalePyramid(3, 1.6, 32, double_image=True),
        ori_module=feature.LAFOrienter(19),
        scale_space_response=True,
        minima_are_also_good=True,
        mr_size=6.0,
    )
    describer = feature.LAFDescriptor(feature.HardNet(pretrained=False))
    # The published matcher was trained on patches of twelve sigma, twice those the direction is taken from.
    return _trained_only(feature.LocalFeature(detector, describer, scaling_coef=2.0))


def _find_frames(network: feature.LocalFeature, image: Image, config: ExtractorConfig) -> Found:
    """Frames of kornia's detector, the strongest of which are shaped, turned and described.

    Key.Net (Barroso-Laguna et al. 2019), shapes by AffNet, directions by OriNet, or differences of Gaussians
    (Lowe 2004); HardNet descriptors (Mishchuk et al. 2017).
    """
    detector, limit = network.detector, config.max_keypoints
    pixels = padded(grey([image], _device(network)), 1, _LEAST_SIDE)
    allowed = mask_of(image, pixels.device)
    if allowed is not None:
        beyond = (0, pixels.shape[-1] - allowed.shape[1], 0, pixels.shape[-2] - allowed.shape[0])
        allowed = pad(allowed, beyond)[None, None]
    if config.kind == "keynet":
        scores, frames = detector.detect(pixels, allowed)
        # A frame's scale is the level's factor times a constant; it is shaped and described where kornia
        # has it.
        points = frames[0, ..., 2] + (feature.get_laf_scale(frames)[0, :, 0] / detector.mr_size - 1) / 2
    else:
        # kornia drops candidates at the edge and off the mask after it has cut to a number: more are asked.
        scores, frames = detector.detect(pixels, 4 * limit + 1000, allowed)
        points = frames[0, ..., 2]
    held = feature.laf_is_filled(frames)[0].nonzero()[:, 0]
    index = held[strongest(points[held], scores[0, held], image, limit)]
    if not len(index):
        return Found(points[index], scores[0, index], points.new_zeros(0, 128), points.new_zeros(0, 2, 2))
    frames = detector.aff(frames[:, index], pixels)
    frames = feature.scale_laf(detector.ori(frames, pixels), network.scaling_coef)
    descriptors = network.descriptor(pixels, frames)
    return Found(points[index], scores[0, index], descriptors[0], frames[0, ..., :2])


FRONT_ENDS = {
    "disk": FrontEnd(_build_plain, _find_disk, {"score_threshold": 0.0, "nms_radius": 2}),
    "aliked": FrontEnd(
        _build_aliked, _find_aliked, {"variant": VARIANTS[0], "score_threshold": 0.2, "nms_radius": 2}
    ),
    "xfeat": FrontEnd(_build_plain, _find_xfeat, {"score_threshold": 0.05}),
    "dedodeb": FrontEnd(_build_dedode, _find_dedode, {}),
    "dedodeg": FrontEnd(_build_dedode, _find_dedode, {}),
    "keynet": FrontEnd(_build_keynet, _find_frames, {"score_threshold": 0.0}),
    "doghardnet": FrontEnd(_build_doghardnet, _find_frames, {}),
}
