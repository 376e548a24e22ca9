"""Stands for Horovod where this folder's parent is on the module path, and becomes Lockstep's door."""

from lockstep.doors.horovod.as_horovod import install

install()
