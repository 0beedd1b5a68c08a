"""slime's launch command, handed to the command line: `python train.py --num-rollout 10 ...`."""

import sys

from flows.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
