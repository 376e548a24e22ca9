"""The modules of `horovod.runner.util` that programs import."""
