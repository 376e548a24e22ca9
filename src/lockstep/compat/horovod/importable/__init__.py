"""A folder for PYTHONPATH that contains a module named `horovod`."""
