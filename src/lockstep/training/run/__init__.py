"""The state and the files of one training run.

`run_state` is everything in a checkpoint but the states of callbacks: `position`, where the run is
in its data; `epoch_totals`, the rows of its history; `saved_state` and `hyperparameters`, whether a
saved state fits. `checkpoint_manager` writes and finds checkpoints in the `run_directory`.
`run_guard` is what else a run asks, such as its ledger.
"""
