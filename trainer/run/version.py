"""The version of all packages; pyproject.toml reads it without importing."""

__version__ = "0.1.0"
