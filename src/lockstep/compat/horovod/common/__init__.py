"""The parts of Horovod's interface that do not depend on the framework, in Horovod's own
modules.
"""
