"""Seeds derived from what they are used for. There is no hidden random state, so nothing can be lost on resume."""

import hashlib


def seed_of(*parts: int | str) -> int:
    """Hash to a 63-bit seed, equal on every machine and in every process: seed_of(run_seed, "sampling", step, uid, sample)."""
    # The type is part of the text, so that 1 and "1" differ. Python's own hash() of a string differs between processes.
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
