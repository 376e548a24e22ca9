"""Checkpoints: a run's state in a folder, complete, checksummed, independent of devices and number
of workers.
"""
