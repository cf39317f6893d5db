"""What the commands in experiments/ share, one module a concern. Importing it says what is not installed."""

import importlib.util
import sys
from pathlib import Path

PACKAGES = "torch procgen pandas scipy matplotlib tensorboard submitit imageio av PIL tqdm"
if missing := [name for name in PACKAGES.split() if importlib.util.find_spec(name) is None]:
    hint = "pip install -r experiments/requirements.txt"
    print(f"{Path(sys.argv[0]).name}: error: there is no {', '.join(missing)}; {hint}", file=sys.stderr)
    sys.exit(2)
