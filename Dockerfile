# Two images: `edge` (tokenizer, gateway, scheduler, `tercet pull`; no torch in it) and `executor` (torch).
#
#   docker build --target edge -t tercet-edge .
#   docker build --target executor -t tercet-executor --build-arg TORCH_INDEX=URL .
#
# TORCH_INDEX: the wheel index that torch comes from, for a CPU or a CUDA build. Empty: whatever pip finds by itself.

FROM python:3.11.15-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PATH=/opt/tercet/bin:$PATH


# The virtual environments are made here and copied whole; the final images hold no source tree and no build tools.
FROM base AS build
RUN python -m venv /opt/tercet
WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY clients/python clients/python


FROM build AS build-edge
COPY executor executor
COPY kernels kernels
COPY services services
RUN pip install -c constraints.txt ./clients/python '.[vllm-grpc]'


FROM build AS build-executor
ARG TORCH_INDEX=
# A layer of its own, before the sources: torch is most of the image and changes least. Without its dependencies,
# since an index of torch builds has few other packages; the next command brings them from the usual index.
RUN if [ -n "$TORCH_INDEX" ]; then pip install --no-deps -c constraints.txt --index-url "$TORCH_INDEX" torch; fi
COPY executor executor
COPY kernels kernels
COPY services services
RUN pip install -c constraints.txt ./clients/python '.[executor]'
# The native kernels, for every instruction set: the CPU that they will run on is not known here. This image has the
# compiler, so the final one needs none for them.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /
RUN python -m kernels.cpu.build


FROM base AS runtime
# The root file system is meant to be read-only: bytecode was compiled at installation, and HOME is a tmpfs.
ENV PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    TERCET_CACHE=/var/lib/tercet
# A volume mounted here for the first time takes over the directory's owner.
RUN useradd --system --uid 10001 --no-create-home --home-dir /tmp tercet \
    && install --directory --owner=tercet --mode=0755 /var/lib/tercet
STOPSIGNAL SIGTERM


FROM runtime AS edge
COPY --from=build-edge /opt/tercet /opt/tercet
USER 10001
# The same image runs the scheduler: `python -m services.scheduler`, checked on port 50052.
CMD ["python", "-m", "services.tokenizer"]
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 \
    CMD ["python", "-m", "services.health", "127.0.0.1:50051"]


FROM runtime AS executor
# Kernels that are compiled at run time need a C compiler here: Triton builds each kernel's launcher with it, in
# TRITON_CACHE_DIR. No version is pinned: Debian's archive keeps only the latest.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV TRITON_CACHE_DIR=/tmp/triton
COPY --from=build-executor /opt/tercet /opt/tercet
USER 10001
CMD ["python", "-m", "services.executor"]
HEALTHCHECK --interval=10s --timeout=10s --start-period=300s --retries=3 \
    CMD ["python", "-m", "services.health", "127.0.0.1:50053"]
