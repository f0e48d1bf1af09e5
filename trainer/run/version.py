"""Version of all packages; pyproject.toml reads it without importing the module."""

__version__ = "0.1.0"
