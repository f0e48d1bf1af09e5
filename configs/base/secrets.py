"""Detection of secrets by name or form, so that they are never written to files or logs. Secrets belong in the environment."""

import os
import re
from collections.abc import Iterator
from typing import Any

ENDINGS = ("apikey", "accesskey", "secretkey", "privatekey", "token", "password", "passwd", "secret", "credentials")
FROM_ENVIRONMENT = "${oc.env:"  # a reference, not the secret itself
USER_IN_ADDRESS = re.compile(r"://[^/@\s]+@")
PASSWORD_IN_ADDRESS = re.compile(r"://[^/@\s:]*:[^/@\s]+@")
NO_SECRETS = ("", "null", "true", "false")
SHORTEST = 8  # minimum length of a secret to hide it by value; a shorter one would also match ordinary text


def is_secret(key: object) -> bool:
    """Whether a key or variable holds a secret, judged by the end of its name."""
    return str(key).lower().replace("-", "").replace("_", "").endswith(ENDINGS)


def secret_name_problems(key: str, name: str) -> Iterator[str]:
    """Problems of the name of a token's variable: values are only hidden in logs if the name is recognized as a secret's."""
    if not is_secret(name):
        yield (
            f"{key}={name}: the variable's name must end like that of a secret (..._TOKEN, ..._API_KEY), so that its value is "
            "hidden in logs"
        )


def hidden(text: str) -> str:
    """``text`` without credentials in URLs and without the values of secret environment variables."""
    for name, value in os.environ.items():
        # Stripped: a variable that was read from a file ends with a newline, which requests do not contain.
        if is_secret(name) and len(value.strip()) >= SHORTEST:
            text = text.replace(value.strip(), "***")
    return USER_IN_ADDRESS.sub("://***@", text)


def secrets_in(key: str, value: Any) -> Iterator[str]:
    """Keys at or below ``key`` whose value contains a secret in plain text."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield from secrets_in(f"{key}.{name}", below)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from secrets_in(key, item)
    # A reference to the environment is not a secret itself, and is the recommended form. Nor is a switch (data.balance_dp_token).
    elif isinstance(value, str) and (
        (is_secret(key) and value.lower() not in NO_SECRETS and not value.startswith(FROM_ENVIRONMENT))
        or PASSWORD_IN_ADDRESS.search(value)
    ):
        yield key


def hidden_lines(text: str) -> str:
    """YAML as printed by Hydra, with secrets replaced by ***."""
    return "".join(map(_hidden_line, text.splitlines(keepends=True)))


def _hidden_line(line: str) -> str:
    # By key first: the value of a secret key is hidden even if it does not look like a secret.
    match = re.match(r"(?P<start>[\s-]*(?P<key>[\w.-]+): )(?P<value>.*\S)", line)
    if match and is_secret(match["key"]) and match["value"] not in ("null", "''") and FROM_ENVIRONMENT not in match["value"]:
        return f"{match['start']}'***'\n"
    return hidden(line)
