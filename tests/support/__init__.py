"""What the tests stand on: leak checks, the warm worker pool, and the layer checks."""
