"""What is a secret by its name or its shape: it belongs into the environment, and is written nowhere."""

import os
import re
from collections.abc import Iterator
from typing import Any

ENDINGS = ("apikey", "accesskey", "secretkey", "privatekey", "token", "password", "passwd", "secret", "credentials")
FROM_ENVIRONMENT = "${oc.env:"  # a reference, not the secret itself
USER_IN_ADDRESS = re.compile(r"://[^/@\s]+@")
PASSWORD_IN_ADDRESS = re.compile(r"://[^/@\s:]*:[^/@\s]+@")
SHORTEST = 8  # characters of a value that is known again wherever it stands


def is_secret(key: object) -> bool:
    return str(key).lower().replace("-", "").replace("_", "").endswith(ENDINGS)


def hidden(text: str) -> str:
    """The text without users and passwords in addresses, and without what secret variables of the environment hold."""
    for name, value in os.environ.items():
        if is_secret(name) and len(value.strip()) >= SHORTEST:  # what is sent of one from a file has no line's end
            text = text.replace(value.strip(), "***")
    return USER_IN_ADDRESS.sub("://***@", text)


def secrets_in(key: str, value: Any) -> Iterator[str]:
    """The keys, from ``key`` down, at which a secret stands as such."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield from secrets_in(f"{key}.{name}", below)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from secrets_in(key, item)
    elif isinstance(value, str) and (
        (is_secret(key) and value and not value.startswith(FROM_ENVIRONMENT)) or PASSWORD_IN_ADDRESS.search(value)
    ):
        yield key


def hidden_lines(text: str) -> str:
    """YAML as Hydra prints it, without secrets."""
    return "".join(map(_hidden_line, text.splitlines(keepends=True)))


def _hidden_line(line: str) -> str:
    match = re.match(r"(?P<start>[\s-]*(?P<key>[\w.-]+): )(?P<value>.*\S)", line)
    if match and is_secret(match["key"]) and match["value"] not in ("null", "''") and FROM_ENVIRONMENT not in match["value"]:
        return f"{match['start']}'***'\n"
    return hidden(line)
