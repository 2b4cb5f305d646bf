"""What our models are called and take; nothing else is imported, as programs that run them need no more."""

KIND = "learned"  # of our front end
SETTINGS = {"score_threshold": 0.004, "nms_radius": 3, "border": 4}  # as the front end was published
# What the inputs of an encoding need beside keypoints: the name of the graph's input, and its shape.
EXTRA = {
    "scale": ("scales", ()),
    "raw_scale": ("scales", ()),
    "raw_sigma": ("scales", ()),
    "orientation": ("angles", ()),
    "raw_orientation": ("angles", ()),
    "raw_counterclockwise": ("angles", ()),
    "score": ("scores", ()),
    "frame": ("affine_frames", (2, 2)),
}
