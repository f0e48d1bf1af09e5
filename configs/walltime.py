"""A time limit as batch systems write it."""

import re


def seconds_of(walltime: str) -> float:
    """ "5400", "90:00", "01:30:00" and "0-01:30:00" are all an hour and a half. Raises ValueError for anything else."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d\d)|(\d+(?:\.\d*)?)", walltime)
    if match is None:
        raise ValueError("must be seconds, or [[days-]hours:]minutes:seconds")
    if match[5] is not None:
        return float(match[5])
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()[:4])
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
