"""The process of a worker: what it is forked from, what it sets up, and the program that it runs.

The launcher starts multiprocessing's fork server (`fork_server`), which has PyTorch loaded
(`preload`). Each worker is forked from it, sets itself up and reports its end (`worker`), and runs
a function or the user's program as Python would (`script`). `late_failures` reports programs that
take long to end after an error; `mpi_singletons` refuses those that use mpi4py.
"""
