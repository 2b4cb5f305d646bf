"""Make an environment, install, and run the tests: `python3 scripts/run_tests.py [pytest options]`."""

import subprocess
import sys

from environment import ROOT, prepare

python = prepare(("test",))
sys.exit(subprocess.run([python, "-m", "pytest", *sys.argv[1:]], cwd=ROOT).returncode)
