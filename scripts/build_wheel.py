"""What `pip wheel .` and `pip install .` do beside copying: they compile the kernels for all processors.

Without a C++ compiler the wheel has none, and everything runs without them. `MATCHER_COMPILED=0` in the
environment leaves them out as well.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def platform_tag(libraries: list[Path]) -> str:
    """The platform of a wheel with these libraries: on Linux by the newest glibc that they need (PEP 600)."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    objdump = shutil.which("objdump")
    if not platform.startswith("linux_") or objdump is None:
        return platform
    symbols = subprocess.run([objdump, "-T", *libraries], capture_output=True, text=True, check=True).stdout
    newest = max((int(minor) for minor in re.findall(r"\bGLIBC_2\.(\d+)", symbols)), default=17)
    return platform.replace("linux", f"manylinux_2_{max(newest, 17)}", 1)


class KernelHook(BuildHookInterface):
    """Adds the libraries of all targets of this machine that the compiler can make to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say what the wheel is for; an editable install compiles on request only."""
        compiling = self._compiling()
        compiler = compiling.find_compiler()
        if version == "editable" or compiler is None or os.environ.get("MATCHER_COMPILED") == "0":
            return
        self._folder = tempfile.TemporaryDirectory()

        def compiled(target: str) -> Path | None:
            path = Path(self._folder.name) / compiling.library_name(target)
            failed = compiling.compile_library(compiler, target, path)
            if failed:
                self.app.display_warning(f"no kernels for {target}: {failed[-300:]}")
            return None if failed else path

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = [path for path in pool.map(compiled, compiling.targets()) if path]
        for path in made:
            build_data["force_include"][str(path)] = f"matcher/kernels/prebuilt/{path.name}"
        if made:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag(made)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled: it is in the wheel."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    def _compiling(self) -> ModuleType:
        """matcher/kernels/compiling.py by itself: what the package needs may not be installed."""
        place = Path(self.root) / "matcher" / "kernels" / "compiling.py"
        spec = importlib.util.spec_from_file_location("matcher_kernel_compiling", place)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
