"""Backends for torch.distributed that Lockstep adds: how data travels between ranks."""
