"""The commands of ``ikkuna``: one module each.

The module ``NAME.py`` implements ``ikkuna NAME`` and defines a `Command` of the name ``command``.
A new module needs no registration.
Modules import heavy packages, such as torch, inside of functions, so that ``ikkuna --help`` is fast.
"""
