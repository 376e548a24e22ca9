"""Replaces itself, where its folder is on the module path, with Lockstep's compatibility layer for
Horovod.
"""

from lockstep.compat.horovod.as_horovod import install

install()
