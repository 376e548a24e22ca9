"""A backend for torch.distributed that carries data through shared memory, for ranks on one machine."""
