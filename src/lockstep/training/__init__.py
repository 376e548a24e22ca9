"""The training loop and its parts, which can also be used separately.

A `Trainer` (`trainer`) runs the loop over epochs and steps (`loop`); between the steps it evaluates
(`evaluate`), saves (`run/`) and calls the callbacks (`callbacks/`). A step (`step/`) computes the
loss (`losses/`) of each part of a global batch. What is done again after the loss of a worker says
`recovery`. Two ways lead there with a loop of one's own: `elastic_steps`, and `prepare`
(`prepared/`). `training_run` makes a training from the options of the command line (`options`).
"""
