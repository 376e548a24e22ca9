"""Collectives and messages over MPI, through mpi4py."""
