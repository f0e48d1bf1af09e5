import hashlib
from itertools import product

from workers.seeding import seed_of


def test_seeds_are_stable_across_machines_and_distinct() -> None:
    digest = hashlib.blake2b(b"int:1\x1fstr:sampling\x1fint:3", digest_size=8).hexdigest()
    assert seed_of(1, "sampling", 3) == int(digest, 16) >> 1
    seeds = [seed_of(run, purpose, step, uid) for run, purpose, step, uid in product(range(3), ("a", "b"), range(10), range(10))]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def test_boundaries_between_parts_matter() -> None:
    assert seed_of("ab", "c") != seed_of("a", "bc") and seed_of(1) != seed_of("1")
