"""A backend for torch.distributed over MPI, through mpi4py."""
