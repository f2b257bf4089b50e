"""Compiles C++ sources of the library when they are first needed, and keeps the results for the next process."""

from ikkuna.native.build import build_library

__all__ = ["build_library"]
