"""Names of torch.distributed that it has but does not declare."""

from torch._C._distributed_c10d import PrefixStore, Store

__all__ = ["PrefixStore", "Store"]
