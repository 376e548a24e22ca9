"""The training loop and its parts, each of which also works alone."""
