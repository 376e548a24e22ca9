"""What pyproject.toml cannot say of the build: the compiled module, and the README as a package
index shows it.

LOCKSTEP_PURE=1 leaves out the compiled module, which gives a wheel for every platform.
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


def compiled_module(is_stable: bool) -> Extension:
    """Return the compiled module of the backend shm, for the stable interface of Python or for this
    Python alone.
    """
    folder = "src/lockstep/transports/shm"
    return Extension(
        "lockstep.transports.shm._native",
        sources=[f"{folder}/_native.c", f"{folder}/_exchange.c", f"{folder}/_ring.c"],
        depends=[f"{folder}/_exchange.h"],
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if is_stable else [],
        py_limited_api=is_stable,
        extra_compile_args=["-O3"],
        # without a compiler the package is installed without it: all of it is also there in Python
        optional=True,
    )


if __name__ == "__main__":
    VERSION = the_one(r'^__version__ = "(.+)"$', "src/lockstep/__init__.py")
    REPOSITORY = the_one(r'^Repository = "(.+)"$', "pyproject.toml")
    # the backend shm, which it is a part of, needs Linux
    IS_PURE = os.environ.get("LOCKSTEP_PURE", "0") not in ("", "0") or sys.platform != "linux"
    # One build for the stable interface of Python 3.11 runs on every later version. That of 3.10
    # has no buffers, and Python without the interpreter lock has none.
    IS_STABLE = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")
    setup(
        version=VERSION,
        long_description=readme_for_index(REPOSITORY, VERSION),
        long_description_content_type="text/markdown",
        ext_modules=[] if IS_PURE else [compiled_module(IS_STABLE)],
        options={"bdist_wheel": {"py_limited_api": "cp311"}} if IS_STABLE and not IS_PURE else {},
    )
