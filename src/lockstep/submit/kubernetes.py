"""Manifests for Kubernetes: an indexed Job with its headless Service, or a JobSet, one launcher in
each pod.

Sources: the API reference of Kubernetes (batch/v1 Job, v1 Service), and of JobSet
(jobset.x-k8s.io/v1alpha2).
"""

from __future__ import annotations

import json
import shlex

from ..errors import ConfigError, LockstepError
from .description import Job, run_tool, split_variables

_START_LIMIT_S = 900
"""Seconds for which pods wait for each other: an image with CUDA takes minutes to pull."""


class Kubernetes:
    """Writes a job as a manifest of an indexed Job, which `kubectl` checks and applies; a
    `description.Scheduler`.
    """

    title = "Kubernetes"
    suffix = ".yaml"
    tool = "kubectl"
    local_python = False

    def write(self, job: Job) -> str:
        """Return the manifest."""
        job.check_limit()
        if not job.request.image:
            expected = (
                f"the name of a container image with the program and Lockstep, which {self.title} "
                "needs"
            )
            raise ConfigError("image", expected, found="nothing")
        body = _jobset(job) if job.request.kind == "jobset" else [*_service(job), "---", *_job(job)]
        return "\n".join([*_head(job), *body]) + "\n"

    def check_here(self, job: Job) -> None:
        """Nothing is known before the cluster has seen the file, see `prepare`."""

    def submit_words(self, path: str) -> list[str]:
        """Return the command that hands over the manifest at `path`."""
        return ["kubectl", "apply", "-f", path]

    def prepare(self, job: Job, path: str) -> None:
        """Let the cluster check the manifest."""
        code, _, error = run_tool([*self.submit_words(path), "--dry-run=server"])
        if code:
            hint = (
                "`kubectl config current-context` and `kubectl cluster-info` say which cluster "
                "that is."
            )
            raise LockstepError(
                f"Kubernetes would not run this job: {error}. {hint} The file is {path}."
            )


def _head(job: Job) -> list[str]:
    namespace = f" -n {shlex.quote(job.request.namespace)}" if job.request.namespace else ""
    needs = (
        "    (JobSet's controller must be in the cluster)" if job.request.kind == "jobset" else ""
    )
    lines = [
        f"# Made by: {job.command}",
        "#",
        f"#   kubectl apply -f {job.name}.yaml{needs}",
        f"#   kubectl{namespace} get pods -l app.kubernetes.io/name={job.name}",
        f"#   kubectl{namespace} logs -f -l app.kubernetes.io/name={job.name} --prefix "
        f"--max-log-requests={job.request.nodes}",
        f"#   kubectl{namespace} delete -f {job.name}.yaml    the trainer saves first; apply it "
        "again to resume",
    ]
    _, names = split_variables(job.variables)
    if names:
        values = " ".join(f'--from-literal={name}="${name}"' for name in names)
        lines += ["#", "# Variables whose values do not belong into a file:"]
        lines.append(f"#   kubectl{namespace} create secret generic {job.name}-env {values}")
    return [*lines, ""]


def _metadata(job: Job, indent: str = "") -> list[str]:
    lines = [f"{indent}metadata:", f"{indent}  name: {job.name}"]
    if job.request.namespace:
        lines.append(f"{indent}  namespace: {_quoted(job.request.namespace)}")
    return [*lines, f"{indent}  labels: {{app.kubernetes.io/name: {job.name}}}"]


def _service(job: Job) -> list[str]:
    return [
        "apiVersion: v1",
        "kind: Service",
        *_metadata(job),
        "spec:",
        "  clusterIP: None                   # headless: each pod gets a name, by which the "
        "others find it",
        "  publishNotReadyAddresses: true    # also while the pods wait for each other",
        f"  selector: {{app.kubernetes.io/name: {job.name}}}",
    ]


def _job(job: Job) -> list[str]:
    lines = ["apiVersion: batch/v1", "kind: Job", *_metadata(job), "spec:"]
    # when one node of a job that is not elastic fails, all others end too
    failures = job.request.retries if job.elastic else job.request.retries * job.request.nodes
    comment = (
        f"{job.request.retries} times, each node"
        if failures > job.request.retries
        else "pods that fail in all"
    )
    lines += _job_spec(
        job, f"  backoffLimit: {failures}    # {comment}, before the job is given up"
    )
    return [*lines, "  template:", *_pod(job, "    ", subdomain=job.name)]


def _jobset(job: Job) -> list[str]:
    return [
        "apiVersion: jobset.x-k8s.io/v1alpha2",
        "kind: JobSet",
        *_metadata(job),
        "spec:",
        "  network:",
        "    enableDNSHostnames: true          # a headless service: each pod gets a name, by "
        "which the others find it",
        "    publishNotReadyAddresses: true    # also while the pods wait for each other",
        f"    subdomain: {job.name}",
        "  failurePolicy:",
        f"    maxRestarts: {job.request.retries}                    # all pods start again "
        "together, and resume",
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
        f"  completions: {job.request.nodes}",
        f"  parallelism: {job.request.nodes}",
        backoff,
    ]
    if job.request.time is not None:
        deadline = f"  activeDeadlineSeconds: {job.request.time - job.lead}"
        lines.append(
            f"{deadline}    # then the pods get SIGTERM, and the grace period below to save"
        )
    return [
        *lines,
        "  podFailurePolicy:",
        "    rules:",
        "    # bad input fails again: do not repeat it",
        "    - {action: FailJob, onExitCodes: {containerName: train, operator: In, values: [2]}}",
        "    # a pod that is evicted, preempted or drained saves, and its place is taken again "
        "without being counted",
        "    - {action: Ignore, onPodConditions: [{type: DisruptionTarget, status: 'True'}]}",
    ]


def _pod(job: Job, indent: str, subdomain: str) -> list[str]:
    """Return the template of the pods."""
    lines = [
        "metadata:",
        f"  labels: {{app.kubernetes.io/name: {job.name}}}",
        "spec:",
        "  restartPolicy: Never",
        f"  terminationGracePeriodSeconds: {job.lead}    # from SIGTERM to SIGKILL; the default, "
        "30, is too short",
    ]
    if subdomain:
        lines.insert(3, f"  subdomain: {subdomain}    # the headless service above")
    lines += ["  containers:", "  - name: train", f"    image: {_quoted(str(job.request.image))}"]
    if job.folder:
        lines.append(f"    workingDir: {_quoted(job.folder)}")
    lines += [
        *_command(job),
        "    env:",
        f"    - {{name: LOCKSTEP_NODES, value: '{job.request.nodes}'}}    # nothing else tells a "
        "pod",
    ]
    values, names = split_variables(job.variables)
    lines += [f"    - {{name: {name}, value: {_quoted(value)}}}" for name, value in values.items()]
    secret = f"{job.name}-env"
    lines += [
        f"    - {{name: {name}, valueFrom: {{secretKeyRef: {{name: {secret}, key: {name}}}}}}}"
        for name in names
    ]
    return _indented([*lines, *_resources(job), *_volumes(job)], indent)


def _command(job: Job) -> list[str]:
    start = [] if "--start-timeout" in job.options else ["--start-timeout", str(_START_LIMIT_S)]
    words = job.run_words("--nodes", "auto", *start)
    if job.request.setup:
        # exec: the launcher shall get the signals
        script = "\n".join([*job.request.setup, f"exec {shlex.join(words)}"])
        words = ["sh", "-e", "-c", script]
    return ["    command:", *(f"    - {_quoted(word)}" for word in words)]


def _resources(job: Job) -> list[str]:
    requests = [f"        cpu: '{job.cpus}'"]
    limits = []
    if job.request.memory is not None:
        requests.append(f"        memory: {job.request.memory}Gi")
        limits.append(f"        memory: {job.request.memory}Gi")
    if job.request.gpus:
        gpus = f"        nvidia.com/gpu: '{job.request.gpus}'"
        limits.append(f"{gpus}    # requests are as limits; a pod gets whole GPUs")
    lines = ["    resources:", "      requests:", *requests]
    return [*lines, "      limits:", *limits] if limits else lines


def _volumes(job: Job) -> list[str]:
    mounts = ["    - {name: shm, mountPath: /dev/shm}"]
    volumes = [
        "  # /dev/shm of a container has 64 MiB, too little for the batches of loader processes, "
        "and for NCCL",
        f"  - {{name: shm, emptyDir: {{medium: Memory, sizeLimit: {job.request.shm}Gi}}}}",
    ]
    if job.request.volume is not None:
        claim, path = job.request.volume
        mounts.append(f"    - {{name: shared, mountPath: {_quoted(path)}}}")
        volumes.append(
            "  # that all pods can write (ReadWriteMany): for checkpoints, so that any of them "
            "can resume"
        )
        volumes.append(
            f"  - {{name: shared, persistentVolumeClaim: {{claimName: {_quoted(claim)}}}}}"
        )
    else:
        volumes.append(
            "  # --volume CLAIM:/PATH adds one for checkpoints; without it they are lost with the "
            "pods"
        )
    lines = ["    volumeMounts:", *mounts, "  volumes:", *volumes]
    if job.request.gpu_type:
        lines.append(f"  nodeSelector: {{nvidia.com/gpu.product: {_quoted(job.request.gpu_type)}}}")
    return lines


def _quoted(text: str) -> str:
    """Return `text` as a string of YAML, and of JSON, of which YAML is a superset."""
    return json.dumps(text, ensure_ascii=False)
