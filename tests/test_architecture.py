"""The rules of the sources, checked on every file of the package, and the exact list of public names."""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import matcher

ROOT = Path(__file__).resolve().parent.parent
FACADE = "matcher"  # matcher/__init__.py: names its modules in strings, imported by the top layer only
MAP = ROOT / "matcher" / "README.md"


def read_layers() -> dict[str, int]:
    """The layer of every file and folder at the top of the package, as the map has it."""
    tree = MAP.read_text("utf-8").split("```layers\n")[1].split("```")[0]
    numbered = (re.match(r"(\d+)\s+(\S+)", line) for line in tree.splitlines())
    return {match[2].removesuffix(".py").rstrip("/"): int(match[1]) for match in numbered if match}


LAYERS = read_layers()
TOP = LAYERS["cli"]  # may import the facade

# Calls that may run while a module is imported: they build a constant and touch nothing else.
PURE_CALLS = re.compile(
    r"NewType|Path|TypeVar|dict|frozenset|namedtuple|_preset|np\.array|range|re\.compile|replace|tuple|field"
    r"|dataclass|torch\.inference_mode|torch\.no_grad"
)
Modules = dict[str, ast.Module]


def read_package() -> Modules:
    """Every module of the package by its dotted name, a folder's `__init__` under the folder's."""
    modules = {}
    for path in sorted((ROOT / "matcher").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return modules


def imports(modules: Modules, name: str) -> set[str]:
    """All that a module imports, at any depth, as dotted names; `from folder import file` names the file.

    Types alone, under TYPE_CHECKING, do not count: nothing is imported for them.
    """
    found = set()
    only_types = {
        inner
        for node in ast.walk(modules[name])
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(modules[name]):
        if node in only_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                is_package = any(other.startswith(f"{name}.") for other in modules)
                parts = name.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in modules else base)
    return found


def part_of(name: str) -> str:
    """The file or folder at the top of the package that a module is in."""
    return name.split(".")[1] if "." in name else FACADE


def layer_faults(modules: Modules) -> list[str]:
    """Imports that go up or sideways."""
    faults = []
    for name in modules:
        here = part_of(name)
        for target in sorted(imports(modules, name)):
            if target.split(".")[0] != "matcher":
                continue
            there = part_of(target)
            if here == FACADE:
                faults.append(f"{name} imports {target}: the facade is lazy")
            elif there == FACADE:
                if LAYERS.get(here, 0) < TOP:
                    faults.append(f"{name} imports the facade")
            elif there != here and LAYERS.get(there, 99) > LAYERS.get(here, 0):
                faults.append(
                    f"{name} (layer {LAYERS.get(here)}) imports {target} (layer {LAYERS.get(there)})"
                )
    return faults


def plain_classes(modules: Modules) -> frozenset[str]:
    """Dataclasses and named tuples of the package: to build one at import is a constant, not work."""
    nodes = (node for module in modules.values() for node in ast.walk(module))
    classes = (node for node in nodes if isinstance(node, ast.ClassDef))
    marks = {each.name: map(ast.unparse, (*each.decorator_list, *each.bases)) for each in classes}
    plain = {"dataclass", "NamedTuple"}
    return frozenset(name for name, mark in marks.items() if plain & {text.split("(")[0] for text in mark})


def import_time_faults(module: ast.Module, plain: frozenset[str], *, is_main: bool) -> list[str]:
    """Statements and calls outside functions that do more than define; `plain` classes may be built."""
    faults = []
    for node in module.body:
        if isinstance(node, ast.If):
            test = ast.unparse(node.test)
            if test not in ("TYPE_CHECKING", "typing.TYPE_CHECKING") and not (is_main and "__name__" in test):
                faults.append(f"line {node.lineno}: if {test}")
        else:
            faults += _statement_faults(node, plain)
    return faults


def _statement_faults(node: ast.stmt, plain: frozenset[str]) -> list[str]:
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass)):
        return []
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        defaults = [d for d in (*node.args.defaults, *node.args.kw_defaults) if d is not None]
        return _call_faults(plain, *defaults, *node.decorator_list)
    if isinstance(node, ast.ClassDef):
        inner = [fault for statement in node.body for fault in _statement_faults(statement, plain)]
        return inner + _call_faults(plain, *node.decorator_list)
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return _call_faults(plain, node.value) if node.value is not None else []
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return []  # a docstring, or the ... of a protocol
    return [f"line {node.lineno}: {ast.unparse(node)[:60]}"]


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """Those that run when a node does, unlike what is in a lambda."""
    if isinstance(node, ast.Call):
        yield node
    for child in () if isinstance(node, ast.Lambda) else ast.iter_child_nodes(node):
        yield from _calls(child)


def _call_faults(plain: frozenset[str], *nodes: ast.expr) -> list[str]:
    faults = []
    for call in (inner for node in nodes for inner in _calls(node)):
        name = ast.unparse(call.func)
        of_text = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Constant)
        on_path = name.startswith("Path(") and name.endswith((".resolve", ".with_name", ".joinpath"))
        if not (PURE_CALLS.fullmatch(name) or name in plain or of_text or on_path):
            faults.append(f"line {call.lineno}: calls {name}")
    return faults


GLOBAL_SWITCHES = re.compile(
    r"torch\.(set_\w+|use_deterministic_algorithms|autograd\.set_\w+|cuda\.set_\w+)|np\.random\.(seed|set_state)"
    r"|np\.seterr|random\.seed|cv2\.(setRNGSeed|setUseOptimized|ocl\.setUseOpenCL)|matplotlib\.(use|rc|rcdefaults)"
    r"|warnings\.filterwarnings"
)
# Modules that are run with `python -m`.
PROGRAMS = {"matcher.__main__", "matcher.collection.workers", "matcher.sfm.mapping"}
# What pyproject.toml calls by another name than Python does.
IMPORT_NAMES = {"opencv-python-headless": "cv2", "pillow": "PIL", "rerun-sdk": "rerun"}
TRAINING_MAY_USE = {"torch", "numpy", "cv2", "safetensors"}

PACKAGE = read_package()
FILES = sorted((ROOT / "matcher").rglob("*.py"))


def in_all(check) -> list[str]:
    return [f"{name}: {fault}" for name, module in PACKAGE.items() for fault in check(name, module)]


def test_every_file_has_a_layer():
    unknown = {name for name in PACKAGE if part_of(name) != FACADE and part_of(name) not in LAYERS}
    assert not unknown, f"give these a layer in matcher/README.md: {sorted(unknown)}"


def test_imports_go_down_without_circles():
    assert layer_faults(PACKAGE) == []
    edges = {name: imports(PACKAGE, name) & set(PACKAGE) - {FACADE} for name in PACKAGE}
    TopologicalSorter(edges).prepare()  # raises where modules import themselves by way of others


def test_nothing_runs_at_import():
    plain = plain_classes(PACKAGE)
    assert in_all(lambda name, tree: import_time_faults(tree, plain, is_main=name in PROGRAMS)) == []


def test_no_global_switches_and_no_import_by_string():
    def switches(name: str, module: ast.Module) -> list[str]:
        calls = [ast.unparse(node.func) for node in ast.walk(module) if isinstance(node, ast.Call)]
        faults = [call for call in calls if GLOBAL_SWITCHES.fullmatch(call)]
        if name == "matcher.processes":  # in forks, which would wait for ever, and within one context
            faults = [fault for fault in faults if not fault.lower().endswith(("num_threads", "numthreads"))]
        if name != FACADE:
            faults += [one for one in calls if one.endswith(("import_module", "__import__", "exec", "eval"))]
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
    nodes = (node for module in PACKAGE.values() for node in module.body)
    counts = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in counts.items() if count > 1 and not name.startswith("_")] == []


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
    """Those of docs/reference/api.md."""
    api = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")
    named = [*re.findall(r"^::: matcher\.(\w+)$", api, re.MULTILINE), "__version__"]
    assert sorted(matcher.__all__) == sorted(dir(matcher)) == sorted(named)
    for name in named:
        assert getattr(matcher, name) is not None
    with pytest.raises(AttributeError, match="load"):
        matcher.absent  # noqa: B018
