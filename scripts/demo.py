"""Create an environment, install, compile the kernels if possible, and match two images.

    python3 scripts/demo.py

Writes outputs/demo.npz and outputs/demo.png. Needs nothing but Python and a network connection.
"""

import subprocess
import sys

from environment import ROOT, prepare

python = prepare()
subprocess.run([python, ROOT / "scripts" / "build_kernels.py"])  # if there is a compiler
(ROOT / "outputs").mkdir(exist_ok=True)
views = [ROOT / "assets" / name for name in ("view0.jpg", "view1.jpg")]
files = ["--output", ROOT / "outputs" / "demo.npz", "--plot", ROOT / "outputs" / "demo.png"]
print("matching assets/view0.jpg and assets/view1.jpg", flush=True)
done = subprocess.run([python, "-m", "matcher", "match", *views, *files]).returncode
print(f"to use it in this shell: {'' if sys.platform == 'win32' else '. '}{python.parent / 'activate'}")
sys.exit(done)
