"""All metadata is in pyproject.toml; this file lets tools that ask for a setup.py find one."""

from setuptools import setup

setup()
