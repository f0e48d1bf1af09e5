"""Time limits in the notation of batch systems."""

import re


def seconds_of(walltime: str) -> float:
    """Seconds of a time limit: "5400", "90:00", "01:30:00" and "0-01:30:00" are all 1.5 hours. Raises ValueError if invalid."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d\d)|(\d+(?:\.\d*)?)", walltime)
    if match is None:
        raise ValueError("must be seconds, or [[days-]hours:]minutes:seconds")
    if match[5] is not None:  # a plain number of seconds
        return float(match[5])
    # Absent groups count as 0: "90:00" has no days and no hours.
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()[:4])
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
