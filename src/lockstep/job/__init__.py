"""What the processes of a job that `lockstep run` or `launch` has started tell each other, and
how.
"""
