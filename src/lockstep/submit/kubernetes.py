"""Manifests for Kubernetes: an indexed Job with its headless Service, or a JobSet, one launcher in each pod.

Sources: the API reference of Kubernetes (batch/v1 Job, v1 Service), and of JobSet (jobset.x-k8s.io/v1alpha2).
"""

from __future__ import annotations

import shlex

from .. import arguments
from ..errors import ConfigError, LockstepError
from .description import START_LIMIT_S, Job, quoted, run_tool, split_variables

__all__ = ["Kubernetes"]

_KINDS = ("job", "jobset")


class Kubernetes:
    """See `description.Scheduler`."""

    title = "Kubernetes"
    suffix = ".yaml"
    tool = "kubectl"
    settings = ("image", "namespace", "volume", "kind", "shm")
    local_python = False

    def write(self, job: Job) -> str:
        """Return the manifest."""
        job.check_limit()
        kind = arguments.choice("kind", job.setting("kind") or "job", _KINDS)
        job.setting("image", self.title, "the name of a container image with the program and Lockstep")
        body = _jobset(job) if kind == "jobset" else [*_service(job), "---", *_job(job)]
        return "\n".join([*_head(job, kind), *body]) + "\n"

    def check_here(self, job: Job) -> None:
        """Nothing is known before the cluster has seen the file, see `prepare`."""

    def submit_words(self, job: Job, path: str) -> list[str]:
        """Return the command that hands over the manifest at `path`."""
        return ["kubectl", "apply", "-f", path]

    def prepare(self, job: Job, path: str) -> None:
        """Let the cluster check the manifest."""
        code, _, error = run_tool([*self.submit_words(job, path), "--dry-run=server"])
        if code:
            hint = "`kubectl config current-context` and `kubectl cluster-info` say which cluster that is."
            raise LockstepError(f"Kubernetes would not run this job: {error}. {hint} The file is {path}.")


def _head(job: Job, kind: str) -> list[str]:
    namespace = f" -n {shlex.quote(job.setting('namespace'))}" if job.setting("namespace") else ""
    needs = "    (JobSet's controller must be in the cluster)" if kind == "jobset" else ""
    lines = [
        f"# Made by: {job.command}",
        "#",
        f"#   kubectl apply -f {job.name}.yaml{needs}",
        f"#   kubectl{namespace} get pods -l app.kubernetes.io/name={job.name}",
        f"#   kubectl{namespace} logs -f -l app.kubernetes.io/name={job.name} --prefix --max-log-requests={job.nodes}",
        f"#   kubectl{namespace} delete -f {job.name}.yaml    the trainer saves first; apply it again to resume",
    ]
    _, names = split_variables(job.variables)
    if names:
        values = " ".join(f'--from-literal={name}="${name}"' for name in names)
        lines += ["#", "# Variables whose values do not belong into a file:"]
        lines.append(f"#   kubectl{namespace} create secret generic {job.name}-env {values}")
    return [*lines, ""]


def _metadata(job: Job, indent: str = "") -> list[str]:
    lines = [f"{indent}metadata:", f"{indent}  name: {job.name}"]
    if job.setting("namespace"):
        lines.append(f"{indent}  namespace: {quoted(job.setting('namespace'))}")
    return [*lines, f"{indent}  labels: {{app.kubernetes.io/name: {job.name}}}"]


def _service(job: Job) -> list[str]:
    return [
        "apiVersion: v1",
        "kind: Service",
        *_metadata(job),
        "spec:",
        "  clusterIP: None                   # headless: each pod gets a name, by which the others find it",
        "  publishNotReadyAddresses: true    # also while the pods wait for each other",
        f"  selector: {{app.kubernetes.io/name: {job.name}}}",
    ]


def _job(job: Job) -> list[str]:
    lines = ["apiVersion: batch/v1", "kind: Job", *_metadata(job), "spec:"]
    # when one node of a job that is not elastic fails, all others end too
    failures = job.restarts if job.elastic else job.restarts * job.nodes
    comment = f"{job.restarts} times, each node" if failures > job.restarts else "pods that fail in all"
    lines += _job_spec(job, f"  backoffLimit: {failures}    # {comment}, before the job is given up")
    return [*lines, "  template:", *_pod(job, "    ", subdomain=job.name)]


def _jobset(job: Job) -> list[str]:
    return [
        "apiVersion: jobset.x-k8s.io/v1alpha2",
        "kind: JobSet",
        *_metadata(job),
        "spec:",
        "  network:",
        "    enableDNSHostnames: true          # a headless service: each pod gets a name, by which the others find it",
        "    publishNotReadyAddresses: true    # also while the pods wait for each other",
        f"    subdomain: {job.name}",
        "  failurePolicy:",
        f"    maxRestarts: {job.restarts}                    # all pods start again together, and resume",
        "    rules:",
        "    - {name: bad-input, action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}",
        "  replicatedJobs:",
        "  - name: node",
        "    replicas: 1",
        "    template:",
        "      spec:",
        *_indented(_job_spec(job, "  backoffLimit: 0    # JobSet restarts all nodes"), "      "),
        "        template:",
        *_pod(job, "          ", subdomain=""),
    ]


def _indented(lines: list[str], indent: str) -> list[str]:
    return [indent + line for line in lines]


def _job_spec(job: Job, backoff: str) -> list[str]:
    """Return the fields of a Job's spec, besides the template of its pods."""
    lines = [
        "  completionMode: Indexed           # JOB_COMPLETION_INDEX is the number of the node",
        f"  completions: {job.nodes}",
        f"  parallelism: {job.nodes}",
        backoff,
    ]
    if job.limit is not None:
        deadline = f"  activeDeadlineSeconds: {job.limit - job.lead}"
        lines.append(f"{deadline}    # then the pods get SIGTERM, and the grace period below to save")
    return [
        *lines,
        "  podFailurePolicy:",
        "    rules:",
        "    # bad input fails again: do not repeat it",
        "    - {action: FailJob, onExitCodes: {containerName: train, operator: In, values: [2]}}",
        "    # a pod that is evicted, preempted or drained saves, and its place is taken again without being counted",
        "    - {action: Ignore, onPodConditions: [{type: DisruptionTarget, status: 'True'}]}",
    ]


def _pod(job: Job, indent: str, subdomain: str) -> list[str]:
    """Return the template of the pods."""
    lines = [
        "metadata:",
        f"  labels: {{app.kubernetes.io/name: {job.name}}}",
        "spec:",
        "  restartPolicy: Never",
        f"  terminationGracePeriodSeconds: {job.lead}    # from SIGTERM to SIGKILL; the default, 30, is too short",
    ]
    if subdomain:
        lines.insert(3, f"  subdomain: {subdomain}    # the headless service above")
    lines += ["  containers:", "  - name: train", f"    image: {quoted(job.setting('image'))}"]
    if job.folder:
        lines.append(f"    workingDir: {quoted(job.folder)}")
    lines += [
        *_command(job),
        "    env:",
        f"    - {{name: LOCKSTEP_NODES, value: '{job.nodes}'}}    # nothing else tells a pod",
    ]
    values, names = split_variables(job.variables)
    lines += [f"    - {{name: {name}, value: {quoted(value)}}}" for name, value in values.items()]
    secret = f"{job.name}-env"
    lines += [f"    - {{name: {name}, valueFrom: {{secretKeyRef: {{name: {secret}, key: {name}}}}}}}" for name in names]
    return _indented([*lines, *_resources(job), *_volumes(job)], indent)


def _command(job: Job) -> list[str]:
    start = [] if "--start-timeout" in job.options else ["--start-timeout", str(START_LIMIT_S)]
    words = job.run_words("--nodes", "auto", *start)
    if job.setup:
        # exec: the launcher shall get the signals
        script = "\n".join([*job.setup, f"exec {shlex.join(words)}"])
        words = ["sh", "-e", "-c", script]
    return ["    command:", *(f"    - {quoted(word)}" for word in words)]


def _resources(job: Job) -> list[str]:
    requests = [f"        cpu: '{job.cpus}'"]
    limits = []
    if job.memory is not None:
        requests.append(f"        memory: {job.memory}Gi")
        limits.append(f"        memory: {job.memory}Gi")
    if job.gpus:
        limits.append(f"        nvidia.com/gpu: '{job.gpus}'    # requests are as limits; a pod gets whole GPUs")
    lines = ["    resources:", "      requests:", *requests]
    return [*lines, "      limits:", *limits] if limits else lines


def _volumes(job: Job) -> list[str]:
    shm = job.setting("shm") or "8"
    mounts = ["    - {name: shm, mountPath: /dev/shm}"]
    volumes = [
        "  # /dev/shm of a container has 64 MiB, too little for the batches of loader processes, and for NCCL",
        f"  - {{name: shm, emptyDir: {{medium: Memory, sizeLimit: {shm}Gi}}}}",
    ]
    if job.setting("volume"):
        claim, colon, path = job.setting("volume").rpartition(":")
        if not colon or not path.startswith("/"):
            raise ConfigError("volume", "CLAIM:/PATH, a persistent volume claim and its place", job.setting("volume"))
        mounts.append(f"    - {{name: shared, mountPath: {quoted(path)}}}")
        volumes.append("  # that all pods can write (ReadWriteMany): for checkpoints, so that any of them can resume")
        volumes.append(f"  - {{name: shared, persistentVolumeClaim: {{claimName: {quoted(claim)}}}}}")
    else:
        volumes.append("  # --volume CLAIM:/PATH adds one for checkpoints; without it they are lost with the pods")
    lines = ["    volumeMounts:", *mounts, "  volumes:", *volumes]
    if job.gpu_type:
        lines.append(f"  nodeSelector: {{nvidia.com/gpu.product: {quoted(job.gpu_type)}}}")
    return lines
