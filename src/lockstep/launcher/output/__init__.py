"""What workers write: from their standard streams to the terminal, files, or a notebook's cell.

`worker_output` says where the streams of a worker go, and reads them if the launcher is to show
them; `output_lines` divides what it reads into lines and progress bars; `log_multiplexer` writes
those of all ranks to one place. `terminal` lends the terminal to one worker for its debugger.
"""
