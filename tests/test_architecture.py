"""The rules of the sources, checked on every file of the package, and the exact list of public names."""

import ast
import re
import sys
import tomllib

import pytest
from source_rules import (
    FACADE,
    LAYERS,
    ROOT,
    circles,
    import_time_faults,
    imports,
    layer_faults,
    made_up,
    part_of,
    plain_classes,
    read_package,
)

import matcher

PUBLIC_NAMES = [
    "PRESETS",
    "Alignment",
    "Camera",
    "Collection",
    "Detections",
    "Features",
    "FrameResult",
    "Image",
    "ImageError",
    "ImageWarning",
    "IntegrityError",
    "KeyframeMap",
    "Map",
    "MatchedSet",
    "Matches",
    "MatcherError",
    "Pipeline",
    "Pose",
    "Result",
    "TemplateFinder",
    "Tracker",
    "TwoViewGeometry",
    "UsageError",
    "__version__",
    "align",
    "find",
    "load",
    "match_set",
    "read_image",
    "stitch",
    "tiled",
]

GLOBAL_SWITCHES = re.compile(
    r"torch\.(set_\w+|use_deterministic_algorithms|autograd\.set_\w+|cuda\.set_\w+)|np\.random\.(seed|set_state)"
    r"|np\.seterr|random\.seed|cv2\.(setRNGSeed|setUseOptimized|ocl\.setUseOpenCL)|matplotlib\.(use|rc|rcdefaults)"
    r"|warnings\.filterwarnings"
)
# Modules that are run with `python -m`.
PROGRAMS = {"matcher.__main__", "matcher.collection.workers", "matcher.sfm.mapping"}
# What pyproject.toml calls by another name than Python does.
IMPORT_NAMES = {
    "opencv-python-headless": "cv2",
    "pillow": "PIL",
    "pillow-heif": "pillow_heif",
    "rerun-sdk": "rerun",
}
TRAINING_MAY_USE = {"torch", "numpy", "cv2", "safetensors"}

# Classes of one name, each with the modules that may have it.
SAME_NAME: dict[str, list[str]] = {}

PACKAGE = read_package()
FILES = sorted((ROOT / "matcher").rglob("*.py"))


def in_all(check) -> list[str]:
    return [f"{name}: {fault}" for name, module in PACKAGE.items() for fault in check(name, module)]


def test_every_file_has_a_layer():
    unknown = {name for name in PACKAGE if part_of(name) != FACADE and part_of(name) not in LAYERS}
    assert not unknown, f"give these a layer in matcher/README.md: {sorted(unknown)}"


def test_imports_go_down():
    assert layer_faults(PACKAGE) == []


def test_no_circles():
    assert circles(PACKAGE) == []


def test_the_rules_of_layers_see_every_kind_of_import():
    assert layer_faults(made_up(images="import torch", verify__planes="from matcher.images import x")) == []
    assert layer_faults(made_up(match__network="from .blocks import Layer", match__blocks="")) == []
    for bad in (
        made_up(images="from matcher.verify.planes import x", verify__planes=""),  # up
        made_up(images="def f():\n    from matcher.pipeline import load", pipeline=""),  # up, in a function
        made_up(match="from . import pipeline", pipeline=""),  # up, relative
        made_up(pipeline="import matcher"),  # the facade from below
        {**made_up(pipeline=""), "matcher": ast.parse("from matcher.pipeline import load")},  # not lazy
    ):
        assert len(layer_faults(bad)) == 1
    turn = made_up(match__a="from .b import x", match__b="def f():\n    from matcher.match import a")
    assert circles(turn) == ["matcher.match.a", "matcher.match.b"]


def test_nothing_runs_at_import():
    plain = plain_classes(PACKAGE)
    assert in_all(lambda name, tree: import_time_faults(tree, plain, is_main=name in PROGRAMS)) == []


@pytest.mark.parametrize("source", ["x = Model()", "def f(x=load()):\n    pass", "if True:\n    x = 1"])
def test_work_at_import_is_seen(source):
    assert len(import_time_faults(ast.parse(source))) == 1


def test_no_global_switches_and_no_import_by_string():
    def switches(name: str, module: ast.Module) -> list[str]:
        calls = [ast.unparse(node.func) for node in ast.walk(module) if isinstance(node, ast.Call)]
        faults = [call for call in calls if GLOBAL_SWITCHES.fullmatch(call)]
        if (
            name == "matcher.processes"
        ):  # in forked processes, which would wait for ever, and within one context
            faults = [
                fault for fault in faults if fault not in ("torch.set_num_threads", "cv2.setNumThreads")
            ]
        if name != FACADE:
            faults += [
                call for call in calls if call.endswith(("import_module", "__import__", "exec", "eval"))
            ]
        return [fault for fault in faults if not fault.endswith(".eval")]

    assert in_all(switches) == []


def test_names_say_what_things_are():
    forbidden = re.compile(r"(^|_)(utils?|helpers?)($|_)|^base(_|$)", re.IGNORECASE)
    bad = [str(path) for path in FILES if forbidden.search(path.stem) or forbidden.search(path.parent.name)]
    for name, module in PACKAGE.items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef) and re.search(r"Manager|Wrapper|Helper|Utils?$", node.name):
                bad.append(f"{name}.{node.name}")
    assert bad == []


def test_no_two_classes_share_a_name():
    homes: dict[str, list[str]] = {}
    for name, module in PACKAGE.items():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    assert {name: where for name, where in homes.items() if len(where) > 1} == SAME_NAME


def test_only_declared_dependencies_are_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project.get("optional-dependencies", {})
    wanted = [
        *project["dependencies"],
        *(item for name, group in extras.items() if name != "test" for item in group),
    ]
    names = [re.match(r"[\w.-]+", item)[0].lower() for item in wanted]
    declared = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}
    assert "torchvision" not in names
    for module in PACKAGE:
        outside = {target.split(".")[0] for target in imports(PACKAGE, module)} - set(sys.stdlib_module_names)
        assert outside <= declared | {"matcher"}, f"{module} imports {outside - declared - {'matcher'}}"
        if module.startswith("matcher.train"):
            assert outside <= TRAINING_MAY_USE | {"matcher"}, module
        assert "matplotlib.pyplot" not in imports(PACKAGE, module), f"{module}: pyplot keeps global state"


def test_public_names_are_exactly_these():
    assert sorted(matcher.__all__) == sorted(PUBLIC_NAMES)
    assert sorted(dir(matcher)) == sorted(PUBLIC_NAMES)
    for name in PUBLIC_NAMES:
        assert getattr(matcher, name) is not None
    with pytest.raises(AttributeError, match="load"):
        matcher.absent  # noqa: B018
