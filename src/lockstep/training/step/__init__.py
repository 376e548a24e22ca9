"""One training step: an update of the model from one global batch, computed by all workers.

`train_step` is the step; its arguments are in `step_arguments`, what it returns in `step_result`,
what travels between the workers beside the gradients in `totals`. Its passes are in
`virtual_worker_passes`, and on their own, for whoever computes them again, in `shards_alone`.
What is asked between the passes and the update: `guards`. Mixed precision: `precision`,
`loss_scale`. What may be wrong with a step: `out_of_memory`, `finite_weights`, `model_changes`,
`separable_updates`.
"""
