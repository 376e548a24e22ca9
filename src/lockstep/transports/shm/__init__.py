"""A backend for torch.distributed that transfers data through shared memory, for ranks on one
host.
"""
