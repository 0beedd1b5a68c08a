"""slime's command for asynchronous training, which is not there yet: says so and starts nothing."""

import sys


def main() -> int:
    """Tells what to use instead; the exit status of a configuration that cannot be run."""
    print(
        "slime: asynchronous training is not there yet: `python train.py` takes the same line, "
        "without --async-buffer-size and --update-weights-interval",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
