"""Losses and metrics: sums over samples and their counts, however a global batch is divided.

`loss` brings every loss to that form: those of torch (`torch_losses`), those that a model computes
itself (`own_loss`), and functions that return both (`sum_and_count`). Whether a mean over samples
is what it says is found by comparing it with the sums of its halves: `mean_check`, when, and on
which samples (`seen_values`); `halves`, how; `model_check`, where the model must be called again.
A loss may keep values of its own: `loss_state` in modules, `outer_values` elsewhere.
"""
