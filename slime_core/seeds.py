"""Counter-based seeds: the same counters give the same seed, so no RNG state can be lost."""

from __future__ import annotations

import hashlib

SEED_BITS = 63
MOST_SEED = 2**32 - 1
"""The largest seed to configure: numpy's, which torch, SGLang and plug-ins take as well."""


def derive_seed(*parts: int | str) -> int:
    """Hashes counters into a seed in [0, 2^63).

    Args:
        parts: for example (run seed, group id, sample position, attempt). Order matters; an
            integer and its decimal string give different seeds.
    """
    body = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(body.encode()).digest()[:8], "big") >> (64 - SEED_BITS)
