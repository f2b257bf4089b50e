"""Compiles what needs no header of torch into the package that is built; everything else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from ikkuna.support.native import compile_into


class BuildPackages(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # then the libraries are compiled when they are needed, as the sources change
            try:
                compile_into(Path(self.build_lib) / "ikkuna")
            except (OSError, RuntimeError) as error:
                self.warn(f"ikkuna compiles its native functions at first use, because this failed now: {error}")


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]  # the libraries know nothing of Python


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildPackages, "bdist_wheel": Wheel})
