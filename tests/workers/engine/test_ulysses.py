"""Which models a number of ranks can share. What they compute: fsdp/test_engine_cuts.py."""

import pytest

from tests.tiny import tiny_config
from workers.engine.ulysses import check_heads


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 2), (2, 2), (2, 1), (4, 2), (4, 1)])
def test_heads_that_ranks_can_share(size: int, kv_heads: int) -> None:
    check_heads(tiny_config(num_key_value_heads=kv_heads), size)


@pytest.mark.parametrize(("size", "reported"), [(3, r"4 = 1 \* 3 \+ 1\); 1, 2 would"), (8, r"4 = 0 \* 8 \+ 4\); 1, 2, 4 would")])
def test_heads_that_they_cannot(size: int, reported: str) -> None:
    with pytest.raises(ValueError, match=f"size={size} does not divide the model's num_attention_heads=4 .{reported}"):
        check_heads(tiny_config(), size)
