"""Sums of gradients over workers, other than those of `DistributedDataParallel`."""
