"""What pyproject.toml cannot say of the build: the compiled modules, and the README as a package
index shows it.

LOCKSTEP_PURE=1 leaves out the compiled modules, which gives a wheel for every platform.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

_CODE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
_IMAGE = re.compile(r"(!\[[^\]]*\]\()(?!https?:)")
_LINK = re.compile(r"(?<!!)(\[[^\]]*\]\()(?!https?:|#)")


def the_one(pattern: str, file: str) -> str:
    """Return what the group of `pattern` matches in a file."""
    (found,) = re.findall(pattern, Path(file).read_text(encoding="utf-8"), re.MULTILINE)
    return str(found)


def readme_for_index(repository: str, version: str) -> str:
    """Return the README with addresses where it has paths, as an index has no other file of the
    repository.

    They lead to the tag of the version, so that they keep showing what belongs to it.
    """
    parts = _CODE.split(Path("README.md").read_text(encoding="utf-8"))
    for i in range(0, len(parts), 2):  # between blocks of code
        parts[i] = _IMAGE.sub(rf"\g<1>{repository}/raw/v{version}/", parts[i])
        parts[i] = _LINK.sub(rf"\g<1>{repository}/blob/v{version}/", parts[i])
    return "".join(parts)


# of the backend shm, and of the flight recorder: by package, all C files in its folder
COMPILED = ("transports/shm", "flight_recorder")


def compiled_module(package: str, is_stable: bool) -> Extension:
    """Return the compiled module of a package, for the stable interface of Python or for this
    Python alone.
    """
    folder = Path("src/lockstep") / package
    return Extension(
        f"lockstep.{package.replace('/', '.')}._native",
        sources=sorted(map(str, folder.glob("*.c"))),
        depends=sorted(map(str, folder.glob("*.h"))),
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if is_stable else [],
        py_limited_api=is_stable,
        extra_compile_args=["-O3"],
        # without a compiler the package is installed without it: all of it is also there in Python
        optional=True,
    )


if __name__ == "__main__":
    VERSION = the_one(r'^__version__ = "(.+)"$', "src/lockstep/__init__.py")
    REPOSITORY = the_one(r'^Repository = "(.+)"$', "pyproject.toml")
    # the backend shm needs Linux, and beside other backends the recorder's time does not show
    IS_PURE = os.environ.get("LOCKSTEP_PURE", "0") not in ("", "0") or sys.platform != "linux"
    # One build for the stable interface of Python 3.11 runs on every later version. That of 3.10
    # has no buffers, and Python without the interpreter lock has none.
    IS_STABLE = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")
    PACKAGES = () if IS_PURE else COMPILED
    setup(
        version=VERSION,
        long_description=readme_for_index(REPOSITORY, VERSION),
        long_description_content_type="text/markdown",
        ext_modules=[compiled_module(package, IS_STABLE) for package in PACKAGES],
        options={"bdist_wheel": {"py_limited_api": "cp311"}} if IS_STABLE and not IS_PURE else {},
    )
