"""The training loop and its parts, which can also be used separately."""
