import pytest

from configs.schema.common import seconds_of


@pytest.mark.parametrize("said", ["5400", "5400.0", "90:00", "1:30:00", "01:30:00", "0-01:30:00"])
def test_an_hour_and_a_half(said: str) -> None:
    assert seconds_of(said) == 5400.0


def test_days() -> None:
    assert seconds_of("2-03:04:05") == ((2 * 24 + 3) * 60 + 4) * 60 + 5


@pytest.mark.parametrize("said", ["", "soon", "1h", "-5", "1:2", "1:2:3:4", "1-30", "1-02:03"])
def test_anything_else_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match="must be seconds, or"):
        seconds_of(said)
