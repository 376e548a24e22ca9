"""What scripts import from `horovod.runner.util`, in the modules where they look for it."""
