"""`lockstep.prepare`: a loop that keeps its own forward and backward passes, on all workers.

`prepare` is what a program calls, and `prepared_loop` what it gets: the body of the loop runs for
each shard of a global batch, and `prepared_optimizer` updates once, from the gradients of all.
What must act once a batch, or begin each shard alike: `once_a_batch`, `batch_buffers`,
`whole_batch`. What is noticed in a body: `model_calls`, `body_losses`, `shard_gradients`,
`all_gradients`; in the graph of a loss (`graph_nodes`): `loss_graphs`, `loss_sums`,
`broadcast_targets`. In an elastic job batches run again: `repeated_batches`.
"""
