"""All environment variables that Lockstep reads or sets, each with what it means (data only).

The code takes its names, defaults and help texts from here, and docs/variables.md is made from it
(`make public-names`). To add a variable, add a `Variable` to `SETTINGS` or `OF_WORKERS`, and read
it in `lockstep.environment`. The variables that tell a worker its place in a job are in
`launchers`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "DEBUG",
    "DEBUG_RANK",
    "DISPLAY",
    "EARLIER_RUN_DIR",
    "ELASTIC",
    "HEARTBEAT_TIMEOUT",
    "JOB_KEY",
    "LAUNCHED",
    "LAUNCHER_TIMEOUT",
    "NETWORK",
    "NETWORK_DIR",
    "NODES",
    "NODE_RANK",
    "OF_OTHERS",
    "OF_WORKERS",
    "PAUSE_TIMEOUT",
    "PROGRESS",
    "REPLAY",
    "RESUME",
    "RUN_ID",
    "SETTINGS",
    "SHM_SIZE",
    "STALL_TIMEOUT",
    "STALL_WARNING",
    "TIMELINE",
    "TRANSPORT",
    "WATCHDOG",
    "WATCHDOG_DIR",
    "OthersVariables",
    "Variable",
]


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of Lockstep's own.

    Attributes:
        name: begins with ``LOCKSTEP_``.
        values: what it may be, as an error says it.
        meaning: what it sets, as the help text of an option says it.
        default: what holds where it is not set; a number is read from here.
        option: the option of `lockstep run` that sets it for the workers; "" for none.
    """

    name: str
    values: str
    meaning: str
    default: str = ""
    option: str = ""

    def help(self) -> str:
        """Return the help text of an option that has this variable as its default."""
        return f"{self.meaning} (default: {self.name}, or {self.default})"


_SECONDS = "a number of seconds above 0"

WATCHDOG = Variable(
    "LOCKSTEP_WATCHDOG",
    "on, strict or off",
    "whether ranks are watched; strict: like collectives on different source lines are an error "
    "too",
    default="on",
    option="--strict, --no-watchdog",
)
STALL_WARNING = Variable(
    "LOCKSTEP_STALL_WARNING",
    _SECONDS,
    "seconds of waiting for a rank after which a warning names it",
    default="5",
)
STALL_TIMEOUT = Variable(
    "LOCKSTEP_STALL_TIMEOUT",
    _SECONDS,
    "seconds of waiting for a rank after which that is an error",
    default="600",
    option="--stall-timeout",
)
HEARTBEAT_TIMEOUT = Variable(
    "LOCKSTEP_HEARTBEAT_TIMEOUT",
    _SECONDS,
    "seconds without an answer after which a host is lost, and a launcher is said to be silent",
    default="30",
    option="--heartbeat-timeout",
)
LAUNCHER_TIMEOUT = Variable(
    "LOCKSTEP_LAUNCHER_TIMEOUT",
    _SECONDS,
    "seconds after which a launcher is lost that hangs, or is stopped, though its host answers; "
    "inf: never",
    default="120, with --elastic 10; on one host none",
    option="--launcher-timeout",
)
PAUSE_TIMEOUT = Variable(
    "LOCKSTEP_PAUSE_TIMEOUT",
    _SECONDS,
    "seconds for which an elastic job waits below MIN workers, or a host of it for hosts that do "
    "not answer, until it ends; inf: for ever",
    default="as --stall-timeout",
    option="--pause-timeout",
)
TIMELINE = Variable(
    "LOCKSTEP_TIMELINE",
    "a folder",
    "where each rank records all collectives, for `lockstep timeline`",
    default="nothing is recorded for longer than the job runs",
    option="--timeline",
)
RESUME = Variable(
    "LOCKSTEP_RESUME",
    "a run directory, or latest",
    "the run that the program's Trainer resumes; latest: the newest in its run_dir",
    default="as the program says",
    option="--resume",
)
TRANSPORT = Variable(
    "LOCKSTEP_TRANSPORT",
    "auto, shm, gloo or mpi4py",
    "how tensors on the CPU travel between workers, where the program does not say it",
    default="auto",
)
SHM_SIZE = Variable(
    "LOCKSTEP_SHM_SIZE",
    "a size such as 64M, 1G or a number of bytes",
    "the most shared memory that a process group may use on a host",
    default="64M, or 4M for each rank of the group if that is more",
)
PROGRESS = Variable(
    "LOCKSTEP_PROGRESS",
    "on or off",
    "whether commands show what they are doing while they start",
    default="on",
)
DEBUG = Variable(
    "LOCKSTEP_DEBUG", "0 or 1", "whether errors of one line have their traceback too", default="0"
)
DEBUG_RANK = Variable(
    "LOCKSTEP_DEBUG_RANK",
    "a rank",
    "the rank that runs in a debugger: the others wait for it without a time limit",
    default="no rank",
    option="--debug-rank",
)
JOB_KEY = Variable(
    "LOCKSTEP_JOB_KEY",
    "any text that nobody guesses",
    "the secret that all launchers of a job on several hosts have in common",
    default="made by the launcher that starts the others; with --nnodes none",
)
NODES = Variable(
    "LOCKSTEP_NODES",
    "a whole number from 1",
    "the number of pods of an indexed Job of Kubernetes, for `--nnodes auto`",
)
NODE_RANK = Variable(
    "LOCKSTEP_NODE_RANK",
    "a whole number from 0",
    "the number of this pod among them",
    default="JOB_COMPLETION_INDEX",
)

SETTINGS = (
    WATCHDOG,
    STALL_WARNING,
    STALL_TIMEOUT,
    HEARTBEAT_TIMEOUT,
    LAUNCHER_TIMEOUT,
    PAUSE_TIMEOUT,
    TIMELINE,
    RESUME,
    TRANSPORT,
    SHM_SIZE,
    PROGRESS,
    DEBUG,
    DEBUG_RANK,
    JOB_KEY,
    NODES,
    NODE_RANK,
)
"""What users set."""

LAUNCHED = Variable("LOCKSTEP_LAUNCHED", "1", "Lockstep's launcher has started this worker")
RUN_ID = Variable(
    "LOCKSTEP_RUN_ID",
    "a text",
    "what all processes of a run have in common, by which those that are left over are ended",
)
WATCHDOG_DIR = Variable(
    "LOCKSTEP_WATCHDOG_DIR", "a folder", "where the ranks of this host write their flight records"
)
DISPLAY = Variable(
    "LOCKSTEP_DISPLAY",
    "notebook, or a number of columns",
    "where the launcher shows the output of the workers",
)
ELASTIC = Variable(
    "LOCKSTEP_ELASTIC",
    "NUMBER:first:SOCKET or NUMBER:joins:SOCKET",
    "a worker of an elastic job: its number, whether the job was running already, and the socket "
    "of its launcher",
)
EARLIER_RUN_DIR = Variable(
    "LOCKSTEP_EARLIER_RUN_DIR",
    "a run directory",
    "where this job trained before all its workers were started again",
)
NETWORK = Variable(
    "LOCKSTEP_NETWORK",
    "as --network",
    "the network that is emulated between the workers",
    option="--network",
)
NETWORK_DIR = Variable("LOCKSTEP_NETWORK_DIR", "a folder", "the clocks of that network's links")
REPLAY = Variable(
    "LOCKSTEP_REPLAY", "a file", "the step that `lockstep replay` computes again, and of which run"
)

OF_WORKERS = (
    LAUNCHED,
    RUN_ID,
    WATCHDOG_DIR,
    DISPLAY,
    ELASTIC,
    EARLIER_RUN_DIR,
    NETWORK,
    NETWORK_DIR,
    REPLAY,
)
"""What Lockstep sets for processes that it starts. A user does not set them."""


@dataclass(frozen=True, slots=True)
class OthersVariables:
    """Variables that belong to other programs.

    Attributes:
        owner: the program whose variables they are.
        names: of the variables; of those that end in ``*``, all that begin so.
        use: what Lockstep does with them.
    """

    owner: str
    names: tuple[str, ...]
    use: str


OF_OTHERS = (
    OthersVariables(
        "setup.py of Lockstep",
        ("LOCKSTEP_PURE",),
        "read when a wheel is built: if it is set, one without the compiled part, for every "
        "platform",
    ),
    OthersVariables(
        "torch.distributed",
        ("MASTER_ADDR", "MASTER_PORT"),
        "read: where the workers meet; set for the workers of Lockstep's launcher",
    ),
    OthersVariables(
        "torchrun",
        (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
            "ROLE_NAME",
            "ROLE_RANK",
            "ROLE_WORLD_SIZE",
            "TORCHELASTIC_ERROR_FILE",
            "TORCHELASTIC_MAX_RESTARTS",
            "TORCHELASTIC_RESTART_COUNT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_USE_AGENT_STORE",
        ),
        "set for the workers of Lockstep's launcher, so that programs for torchrun run unchanged; "
        "read where torchrun has set them",
    ),
    OthersVariables(
        "OpenMP",
        ("OMP_NUM_THREADS",),
        "read: threads of PyTorch in a worker; set for workers to the cores that each has",
    ),
    OthersVariables(
        "NCCL, Gloo",
        ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
        "set, unless they are, with --network-interface, and where it is known by which interface "
        "the hosts reach each other",
    ),
    OthersVariables(
        "PyTorch",
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING",),
        "set to 1 for workers, unless it is set",
    ),
    OthersVariables(
        "cuBLAS",
        ("CUBLAS_WORKSPACE_CONFIG",),
        "set where the same bits are asked for on a GPU, unless it is set",
    ),
    OthersVariables(
        "GPU drivers",
        (
            "CUDA_VISIBLE_DEVICES",
            "HIP_VISIBLE_DEVICES",
            "ROCR_VISIBLE_DEVICES",
            "ZE_AFFINITY_MASK",
            "ASCEND_RT_VISIBLE_DEVICES",
        ),
        "read: how many devices a worker sees; by the first three `lockstep.ray` gives each worker "
        "its own",
    ),
    OthersVariables(
        "Slurm",
        (
            "SLURM_CLUSTER_NAME",
            "SLURM_JOB_ID",
            "SLURM_JOB_NODELIST",
            "SLURM_JOB_NUM_NODES",
            "SLURM_RESTART_COUNT",
            "SLURM_STEP_ID",
            "SLURM_STEP_NODELIST",
        ),
        "read: the nodes of a job, and where its workers meet",
    ),
    OthersVariables(
        "Kubernetes",
        ("JOB_COMPLETION_INDEX",),
        "read for `--nnodes auto`",
    ),
    OthersVariables(
        "Kubeflow Trainer",
        ("PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NNODES", "PET_NODE_RANK"),
        "read for `--nnodes auto`",
    ),
    OthersVariables(
        "SkyPilot",
        ("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
        "read for `--nnodes auto`",
    ),
    OthersVariables(
        "dstack",
        ("DSTACK_MASTER_NODE_IP", "DSTACK_NODES_NUM", "DSTACK_NODE_RANK"),
        "read for `--nnodes auto`",
    ),
    OthersVariables(
        "SageMaker",
        ("SM_CURRENT_HOST", "SM_HOSTS"),
        "read for `--nnodes auto`",
    ),
    OthersVariables(
        "Horovod",
        (
            "HOROVOD_ELASTIC_TIMEOUT",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR",
            "HOROVOD_GLOO_RENDEZVOUS_PORT",
            "HOROVOD_STALL_CHECK_DISABLE",
            "HOROVOD_STALL_CHECK_TIME_SECONDS",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
            "HOROVOD_START_TIMEOUT",
            "HOROVOD_TIMELINE",
            "HOROVOD_TIMELINE_MARK_CYCLES",
        ),
        "read by `lockstep.compat.horovod` and `lockstep horovodrun`, as Horovod reads them",
    ),
    OthersVariables(
        "Horovod",
        ("HOROVOD_HOSTNAME",),
        "set by `lockstep run --as-horovod`, with those of its launcher",
    ),
    OthersVariables(
        "Python",
        ("PYTHONPATH", "PYTHONUNBUFFERED"),
        "sent to other hosts; `--as-horovod` puts the folder in which `import horovod` finds "
        "`lockstep.compat.horovod` in front of PYTHONPATH",
    ),
    OthersVariables(
        "terminals",
        ("NO_COLOR", "TERM"),
        "read: no colours if the first is set, or the second is dumb",
    ),
    OthersVariables(
        "the system",
        ("XDG_RUNTIME_DIR",),
        "read: where private folders of this user may be",
    ),
    OthersVariables(
        "sshd",
        ("SSH_CONNECTION",),
        "read on other hosts: the address by which the first host reaches them",
    ),
    OthersVariables(
        "setproctitle",
        ("SPT_NOENV",),
        "set while it is imported, so that the variables of workers stay readable in /proc",
    ),
    OthersVariables(
        "the GNU C library",
        ("GLIBC_TUNABLES", "MALLOC_*"),
        "read: workers leave the settings of the allocator as the user has made them",
    ),
)
"""Variables of others that Lockstep reads or sets, without those of `launchers.LAUNCHERS` that give
a worker its place. What torch, NCCL, wandb and other libraries read for themselves is not here.
"""
