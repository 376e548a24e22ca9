"""Compatibility layers: the interfaces of Horovod (`horovod`) and of MXNet's Gluon (`gluon`), on
top of Lockstep.
"""
