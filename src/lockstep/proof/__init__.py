"""What shows that a training is right, and finds what is wrong in it."""
