"""What algorithms would make of one stored batch: loss, gradient, and how the gradients agree."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from slime_core.run.replay import ConfigOf, Replay


@dataclass(frozen=True)
class Compared:
    """One algorithm on a batch.

    Attributes:
        algorithm: its name.
        cosine: between its gradient and the first algorithm's; NaN where one of them is 0.
        effective_samples: see PolicyTrainer.probe.
    """

    algorithm: str
    loss: float
    grad_norm: float
    cosine: float
    effective_samples: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(replay: Replay, iteration: int, variants: dict[str, ConfigOf]) -> list[Compared]:
    """Looks at the gradients of a stored batch with the weights before its iteration.

    Args:
        variants: name -> configuration; the first is what the others are compared with.

    Raises:
        ConfigError, DigestError: see Replay.probe.
    """
    found: list[Compared] = []
    first: np.ndarray | None = None
    for name, probe in replay.probe(iteration, variants):
        gradient = np.asarray(probe["gradient"], dtype=np.float64)
        first = gradient if first is None else first
        found.append(
            Compared(
                name,
                probe["loss"],
                probe["grad_norm"],
                cosine(first, gradient),
                probe["effective_samples"],
            )
        )
    return found


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of the angle between two vectors; NaN where one of them is 0."""
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else float("nan")
