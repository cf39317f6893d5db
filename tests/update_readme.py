"""Put the present diff of ppo.py and ppo_ewma.py into the README: python tests/update_readme.py"""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(?<=```diff\n).*?(?=```)", re.S)


def diff():
    command = ["diff", "-u", "--label", "ppo.py", "--label", "ppo_ewma.py", "ppo.py", "ppo_ewma.py"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(BLOCK.sub(lambda _: diff(), readme.read_text(), count=1))
