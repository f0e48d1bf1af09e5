import pytest

from configs.schema.common import seconds_of


@pytest.mark.parametrize("text", ["5400", "5400.0", "90:00", "1:30:00", "01:30:00", "0-01:30:00"])
def test_spellings_of_an_hour_and_a_half_are_parsed(text: str) -> None:
    assert seconds_of(text) == 5400.0


def test_days_are_parsed() -> None:
    assert seconds_of("2-03:04:05") == ((2 * 24 + 3) * 60 + 4) * 60 + 5


@pytest.mark.parametrize("text", ["", "soon", "1h", "-5", "1:2", "1:2:3:4", "1-30", "1-02:03"])
def test_other_spellings_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be seconds, or"):
        seconds_of(text)
