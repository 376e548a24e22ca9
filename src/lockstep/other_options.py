"""What the options of the commands `run` and `train` are called in other launchers and libraries,
and what they are called here, for errors.
"""

from __future__ import annotations

from .other_names import rows

_NP = "the number of workers is -np N"
_SSH = "hosts are -H a:4,b:4 or --hostfile FILE"

RUN_FLAGS: dict[str, str] = {
    **rows(
        _NP,
        "--nproc-per-node --num-processes --num-gpus --gpus --workers --num-workers --world-size "
        "--devices",
    ),
    **rows(_NP, "--ppn --ntasks --nprocs -c"),
    **rows(
        "not needed: without --nnodes and -H the job has one host",
        "--standalone --multi-gpu --same-network",
    ),
    **rows("the number of hosts is --nnodes N", "--num-nodes --num-machines -N"),
    **rows("the number of this host is --node-rank I", "--machine-rank --host-rank"),
    **rows(
        "the first host is --master-addr ADDR",
        "--main-process-ip --rdzv-endpoint --rdzv-backend --rdzv-conf",
    ),
    **rows("the first host is --master-addr ADDR", "--rdzv-id --coordinator-address --local-addr"),
    **rows("the port is --master-port PORT", "--main-process-port --port"),
    **rows(
        "restarts after a failure are --restarts N; --elastic MIN:MAX replaces lost workers",
        "--max-restarts",
    ),
    **rows(
        "lost workers are replaced with --elastic MIN:MAX", "--min-np --max-np --elastic-training"
    ),
    **rows(
        "it is --output-dir DIR, with --tee to print the output as well",
        "--log-dir --redirects -r -t --output",
    ),
    **rows(
        "every rank has its number before its lines; --no-prefix leaves it out",
        "--tag-output --local-ranks-filter",
    ),
    **rows(
        _SSH,
        "--host -host --include --exclude --machinefile -machinefile -f --num-hosts "
        "--slots-per-host",
    ),
    **rows(
        "not needed: workers may share cores",
        "--oversubscribe --bind-to --map-by --rank-by --use-hwthread-cpus",
    ),
    **rows("not needed: anybody may run it", "--allow-run-as-root"),
    **rows(
        "options of MPI are not known: lockstep run starts the ranks itself",
        "--mca -mca -genv -envall --prefix",
    ),
    **rows(
        "the threads of a worker are --threads N",
        "--num-cpu-threads-per-process --cpus-per-task --omp-threads",
    ),
    **rows(
        "any program is run: a Python file, or a module with -m",
        "--no-python --run-path --executable",
    ),
    **rows(
        'it is an argument in the program: Trainer(..., precision="bf16")',
        "--mixed-precision --fp16 --bf16",
    ),
    **rows("it is an argument in the program: lockstep.init(device)", "--cpu --device --tpu --gpu"),
    **rows("CUDA_VISIBLE_DEVICES chooses them", "--gpu-ids"),
    **rows(
        'it is an argument in the program: Trainer(..., strategy="sharded")',
        "--use-fsdp --use-deepspeed --fsdp",
    ),
    **rows(
        'it is an argument in the program: Trainer(..., strategy="sharded")',
        "--deepspeed --zero-stage",
    ),
    **rows(
        "it is an argument in the program: prepare_model(..., compile_model=True)",
        "--dynamo-backend --compile",
    ),
    **rows("options of a run are those here; there is no file of them", "--config-file --config"),
    **rows(
        "the watchdog's limit is --stall-timeout S", "--timeout --rdzv-timeout --monitor-interval"
    ),
    **rows("variables are passed with -x NAME or -x NAME=VALUE", "-env -genvlist"),
    **rows("--quiet prints no messages of the launcher", "--silent --log-level"),
    **rows("the version is printed by `lockstep --version`", "--version -V"),
}
"""Other options of `lockstep run`: those of torchrun, accelerate launch, deepspeed and mpirun."""

TRAIN_FLAGS: dict[str, str] = {
    **rows(
        "the samples of a step over all workers are --global-batch-size N",
        "--batch-size --batch -b --bs",
    ),
    **rows(
        "the samples of a step over all workers are --global-batch-size N",
        "--per-device-train-batch-size",
    ),
    **rows("the learning rate is --lr X", "--learning-rate"),
    **rows("the number of epochs is --epochs N", "--max-epochs --num-epochs --num-train-epochs -e"),
    **rows(
        "the number of workers is --workers N",
        "-np -n --nproc --num-proc --nproc-per-node --num-processes --gpus",
    ),
    **rows(
        "the loader processes of each worker are --loader-workers N",
        "--num-workers --dataloader-num-workers",
    ),
    **rows(
        "the maximum norm of the gradient is --max-grad-norm X",
        "--gradient-clip-val --grad-clip --clip",
    ),
    **rows(
        "it is --gradient-accumulation-steps N",
        "--accumulate-grad-batches --grad-accum --accumulation-steps",
    ),
    **rows("the number format is --precision bf16", "--amp --fp16 --bf16 --mixed-precision"),
    **rows(
        "the run directory is --run-dir DIR", "--output-dir --out --output --save-dir --log-dir -o"
    ),
    **rows(
        "checkpoints are --checkpoint-every INTERVAL",
        "--save-every --save-steps --checkpoint-interval",
    ),
    **rows("the schedule is --schedule NAME", "--lr-scheduler --scheduler --lr-scheduler-type"),
    **rows("the data set is --data NAME", "--dataset"),
    **rows("the network is --model NAME", "--arch -a --net --network"),
    **rows("the optimizer is --optimizer NAME", "--opt --optim"),
    **rows(
        "several hosts: `lockstep run -H a:4,b:4 -m lockstep train ...`",
        "-H --hosts --hostfile --nnodes --nodes",
    ),
    **rows("the device is --device cpu", "--cpu --no-cuda --cuda --gpu"),
}
"""Other options of `lockstep train`."""
