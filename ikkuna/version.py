"""The version of the library."""

__all__: list[str] = []

__version__ = "0.1.0"
