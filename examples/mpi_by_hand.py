"""Data parallelism by hand over MPI's verbs: each worker's own part, and the mean of the gradients
over all samples.

python examples/mpi_by_hand.py [EPOCHS]
mpiexec -n 2 python examples/mpi_by_hand.py    or torchrun --nproc-per-node 2, or lockstep run -np 2

The mean over N workers with equal parts is sum(g) / N. It is not sum(g) / (sum(g) * N), as one may
read: that is 1 / N whatever the gradients are, so that every weight goes down by the same amount,
at every step. Where parts are not equal, the mean of the workers' means is not that of the samples
either; here sums are divided by the number of samples.
"""

import sys
import time

import torch
import torch.nn.functional as F

import lockstep


def sum_gradients(model, images, labels):
    """The sum of this worker's losses; the gradients are those of the sum. A worker without a
    sample has zeros.
    """
    model.zero_grad()  # else the gradients of earlier steps would be in it, too
    loss = F.cross_entropy(model(images), labels, reduction="sum")
    loss.backward()
    return loss.detach()


def train_step(comm, model, images, labels, lr):
    """One step of gradient descent over a batch that all workers have, each computing on every
    size-th sample of it.
    """
    loss = sum_gradients(model, images[comm.rank :: comm.size], labels[comm.rank :: comm.size])
    comm.allreduce(loss)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = comm.allreduce(parameter.grad) / len(images)
            parameter -= lr * mean
    return float(loss) / len(images)


def accuracy(model, data):
    images, labels = data.collated_batch(range(len(data)))
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def train(comm, epochs=5, batch_size=64, lr=0.1):
    training, test = lockstep.data.digits()
    model = lockstep.models.lenet()
    for parameter in model.parameters():  # all begin with rank 0's values, and so stay the same
        comm.broadcast(parameter.detach())
    order = torch.Generator().manual_seed(0)  # the same batches on every worker
    for epoch in range(epochs):
        start = time.perf_counter()
        batches = torch.randperm(len(training), generator=order).split(batch_size)
        losses = [
            train_step(comm, model, *training.collated_batch(indices), lr) for indices in batches
        ]
        seconds = time.perf_counter() - start
        if comm.rank == 0:
            print(
                f"epoch {epoch + 1}  loss {sum(losses) / len(losses):.4f}  time {seconds:.2f} s "
                f"on {comm.size} workers  test accuracy {accuracy(model, test):.2%}"
            )
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    train(lockstep.init(device="cpu"), *map(int, sys.argv[1:]))
