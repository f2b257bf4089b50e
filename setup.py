"""A shim, so that classic commands work; everything is in pyproject.toml."""

from setuptools import setup

setup()
