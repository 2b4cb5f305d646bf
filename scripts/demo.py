"""Make an environment, install, compile the kernels where processor and compiler allow it, and match two
images with the shipped weights: `python3 scripts/demo.py`."""

import subprocess
import sys

from environment import ROOT, prepare

python = prepare()
subprocess.run([python, ROOT / "scripts" / "build_kernels.py"])
(ROOT / "outputs").mkdir(exist_ok=True)
views = [ROOT / "assets" / name for name in ("view0.jpg", "view1.jpg")]
files = ["--output", ROOT / "outputs" / "demo.npz", "--plot", ROOT / "outputs" / "demo.png"]
print("matching assets/view0.jpg and assets/view1.jpg", flush=True)
sys.exit(subprocess.run([python, "-m", "matcher", "match", *views, *files]).returncode)
