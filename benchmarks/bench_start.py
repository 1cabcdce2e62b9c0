"""Start of the command line against `import torch`, whole processes, run in turn.

Goal: `gossamer --help` takes at most a quarter of `import torch`.
Run: python benchmarks/bench_start.py
"""

from __future__ import annotations

import subprocess
import sys

from _timing import medians, show

COMMANDS = {
    "import torch": [sys.executable, "-c", "import torch"],
    "bare interpreter": [sys.executable, "-c", "pass"],
    "gossamer --help": [sys.executable, "-m", "gossamer", "--help"],
    "gossamer list": [sys.executable, "-m", "gossamer", "list"],
    "gossamer reproduce --help": [sys.executable, "-m", "gossamer", "reproduce", "--help"],
    "import gossamer": [sys.executable, "-c", "import gossamer"],
}


def main() -> None:
    runs = {
        name: lambda command=command: subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        for name, command in COMMANDS.items()
    }
    show("whole process", medians(runs, repeats=7), "import torch")


if __name__ == "__main__":
    main()
