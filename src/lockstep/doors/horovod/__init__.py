"""Horovod's interface: ``import lockstep.doors.horovod.torch as hvd``; see docs/horovod.md."""
