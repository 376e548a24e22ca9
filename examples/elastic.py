"""Workers may be lost, leave and join while this trains; the result has the same bits.

python examples/elastic.py                            one worker, undisturbed
lockstep run --elastic 1:4 -np 3 examples/elastic.py  three; kill one, or `lockstep resize 2`
"""

import sys

import torch

import lockstep

comm = lockstep.init("cpu")
torch.manual_seed(0)
digits, _ = lockstep.data.digits()
model = lockstep.models.lenet()
trainer = lockstep.Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    torch.nn.CrossEntropyLoss(),
    global_batch_size=64,
    virtual_workers=4,  # without it, results agree up to rounding
)
trainer.fit(digits, epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 5)
if comm.rank == 0:
    print("fingerprint", lockstep.fingerprint(model, trainer.optimizer)[:16], flush=True)
