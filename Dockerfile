# An image with Lockstep from this folder; the steps are those of docs/first-ten-minutes.md.
#
#   docker build -t lockstep .                            for CPUs
#   docker build -t lockstep --build-arg TORCH=cu126 .    for NVIDIA GPUs; the driver is the host's
#   docker run --rm -v "$PWD:/work" lockstep lockstep run -np 2 train.py
#   docker run --rm --gpus all -v "$PWD:/work" lockstep lockstep doctor
#

ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# A build of torch: cpu, or a version of CUDA such as cu126 (https://pytorch.org/get-started/locally/).
ARG TORCH=cpu

# A C compiler makes shared memory faster; ssh is for `lockstep run -H`, ip for `lockstep doctor`.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev openssh-client iproute2 \
    && rm -rf /var/lib/apt/lists/*

RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

WORKDIR /opt/lockstep
COPY constraints.txt pyproject.toml setup.py README.md LICENSE NOTICE ./

# torch first, in a layer of its own: it is most of the image, and changes least.
RUN python -m pip install --no-cache-dir -c constraints.txt --index-url "https://download.pytorch.org/whl/${TORCH}" torch

COPY src src
# hadolint ignore=DL3042
RUN PIP_NO_CACHE_DIR=1 python -m pip install -c constraints.txt -e '.[demo]'

# Programs and their run directories are mounted here. The launcher is to be PID 1: it forwards signals to the ranks.
WORKDIR /work
CMD ["lockstep", "doctor"]
