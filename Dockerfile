# syntax=docker/dockerfile:1
# Two images: `cpu` (default), and `cuda` for Hopper and Blackwell GPUs (SM90 to SM103).
#
#   docker build -t eyas:cpu .
#   docker build -t eyas:cuda --target cuda .
#
# Base images are pinned by tag; pin them by digest in a registry of your own.
# The cuda target has not been built and run on a B200 yet: unverified on B200. See docs/operations.md.
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm
ARG CUDA_VERSION=13.0.2

# --- cpu ---------------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS cpu-build
# PyTorch's CPU wheel index makes the image small; without it pip takes what its default index has.
ARG TORCH_INDEX=
WORKDIR /src
COPY requirements.lock requirements-grammar.lock ./
COPY deploy/install.sh deploy/
RUN deploy/install.sh packages cpu
COPY pyproject.toml README.md LICENSE ./
COPY engine engine
COPY service service
COPY models models
RUN deploy/install.sh app

# --- cuda --------------------------------------------------------------------------------------------------
FROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu24.04 AS cuda-build
# The torch that the GPU tests run with; FlashMLA's wheel is built for it.
ARG TORCH=torch==2.11.0
ARG TORCH_INDEX=
ARG FLASHINFER_CUDA_ARCH_LIST="9.0a 10.0a 10.3a"
WORKDIR /src
COPY requirements.lock requirements-grammar.lock ./
COPY deploy/install.sh deploy/requirements-cuda.txt deploy/build_kernels.py deploy/
RUN deploy/install.sh system cuda-build \
    && deploy/install.sh packages cuda \
    && FLASHINFER_WORKSPACE_BASE=/tmp deploy/install.sh kernels
COPY pyproject.toml README.md LICENSE ./
COPY engine engine
COPY service service
COPY models models
RUN deploy/install.sh app

FROM nvidia/cuda:${CUDA_VERSION}-base-ubuntu24.04 AS cuda
LABEL org.opencontainers.image.title="eyas" \
      org.opencontainers.image.description="MLA language models with speculative decoding, CUDA build" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY deploy/install.sh /src/deploy/
RUN /src/deploy/install.sh system cuda && /src/deploy/install.sh user && rm -rf /src
COPY --from=cuda-build /opt/eyas /opt/eyas
# Everything that is written at run time goes to /tmp, so that the root can be read-only. Triton compiles its launchers
# into its cache and loads them from there: a tmpfs at /tmp needs the option exec.
ENV PATH=/opt/eyas/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    FLASHINFER_WORKSPACE_BASE=/tmp \
    TRITON_CACHE_DIR=/tmp/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    EYAS_HOST=0.0.0.0 \
    EYAS_LOG_FORMAT=json \
    EYAS_MODEL=/opt/eyas/models/eyas-14m
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["/opt/eyas/bin/python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('EYAS_PORT', '8000') + '/health', timeout=3)"]
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/eyas/bin/eyas"]
CMD ["serve"]

# --- the default: the last stage ---------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS cpu
LABEL org.opencontainers.image.title="eyas" \
      org.opencontainers.image.description="MLA language models with speculative decoding, CPU build" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY deploy/install.sh /src/deploy/
RUN /src/deploy/install.sh system cpu && /src/deploy/install.sh user && rm -rf /src
COPY --from=cpu-build /opt/eyas /opt/eyas
ENV PATH=/opt/eyas/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    EYAS_HOST=0.0.0.0 \
    EYAS_LOG_FORMAT=json \
    EYAS_MODEL=/opt/eyas/models/eyas-14m
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["/opt/eyas/bin/python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('EYAS_PORT', '8000') + '/health', timeout=3)"]
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/eyas/bin/eyas"]
CMD ["serve"]
