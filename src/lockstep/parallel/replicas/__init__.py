"""One process and many devices: copies of a model, parts of a batch, joined graphs, a thread for
each device.
"""
