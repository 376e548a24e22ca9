"""What Horovod's interfaces for all frameworks have in common, in the modules where scripts look for it."""
