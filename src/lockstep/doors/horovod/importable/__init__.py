"""A folder for PYTHONPATH, in which a package is called `horovod`."""
