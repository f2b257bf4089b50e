"""The commands of ``ikkuna``: one module each.

The module ``NAME.py`` implements ``ikkuna NAME``; a new module needs no registration.
The first line of its docstring is what ``ikkuna --help`` shows, the rest is what ``ikkuna NAME --help`` shows.
``run(options, terminal)`` returns the exit status: 0, or 1 if the command has found something.
It raises `ikkuna.errors.IkkunaError` or `OSError` for bad input; the exit status is then 2.
``add_arguments(parser)`` adds the arguments to an `argparse.ArgumentParser`, if there are others than ``--json``.
Modules import heavy packages, such as torch, inside of functions, so that ``ikkuna --help`` is fast.
"""
