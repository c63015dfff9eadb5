# servekit in a container.
#
#     docker build -t servekit:cpu --build-arg PIP_EXTRA_INDEX_URL=... .    PyTorch's CPU index
#     docker build -t servekit:cuda --build-arg VARIANT=cuda .
#     docker run --init -p 8000:8000 -v ./my.yaml:/config.yaml:ro -v models:/cache servekit:cpu
#
# and with GPUs `--gpus all`. It runs as user 10001 and writes to /cache, /run/servekit and /tmp only:
#
#     docker run --init --read-only --cap-drop ALL --security-opt no-new-privileges \
#         --tmpfs /tmp --tmpfs /run/servekit:mode=1777 ...
#
# The file needs `keys` (docker run --rm servekit servekit key new), or else `-e SERVEKIT_INSECURE=1`
# says that whoever reaches the published port may use it. Keep `port: 8000` in it; the host is
# 0.0.0.0 here whatever the file says, because a container's loopback is reached by nobody.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
# cpu or cuda: which of PyTorch's builds this must turn out to be. CUDA's is what PyPI has.
ARG VARIANT=cpu
# Such as [otel], [vllm] or [otel,llamacpp].
ARG EXTRAS=""
ARG PIP_EXTRA_INDEX_URL
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /build
RUN python -m venv /opt/servekit
# The dependencies by themselves, so that a change of servekit does not fetch them again.
COPY pyproject.toml README.md LICENSE ./
COPY deploy/constraints.txt deploy/constraints-vllm.txt deploy/
# vLLM holds some packages back, so a set of versions with it is a file of its own.
RUN case "${EXTRAS}" in *vllm*) pins=constraints-vllm.txt ;; *) pins=constraints.txt ;; esac \
    && mkdir servekit && touch servekit/__init__.py \
    && /opt/servekit/bin/pip install --no-cache-dir -c "deploy/${pins}" ".${EXTRAS}" \
# Setuptools would take the empty package from here again: what is copied in next is older.
    && rm -r servekit build ./*.egg-info
RUN /opt/servekit/bin/python -c "import sys, torch; found = 'cuda' if torch.version.cuda else 'cpu'; \
sys.exit(found != '${VARIANT}' and f'VARIANT=${VARIANT}, but PyTorch is built for {found}: for cpu, give its CPU index as PIP_EXTRA_INDEX_URL')"
COPY servekit servekit
RUN /opt/servekit/bin/pip install --no-cache-dir --no-deps --force-reinstall . \
# What nobody runs: C++ headers and CMake files of torch (on the CPU; Triton's compiler wants its own
# only), tests of the dependencies, and pip itself.
    && site=$(/opt/servekit/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
    && rm -rf "$site"/torch/include "$site"/torch/share/cmake "$site"/torch/test \
    && find "$site" -type d -name tests -not -path '*/torch/*' -prune -exec rm -rf {} + \
    && /opt/servekit/bin/pip uninstall -q -y pip

FROM python:${PYTHON}-slim-bookworm
ARG VARIANT=cpu
# Triton compiles the launchers of its kernels, once each, with a C compiler.
# hadolint ignore=DL3008
RUN if [ "$VARIANT" = cuda ]; then apt-get update \
        && apt-get install -y --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; fi
RUN useradd --uid 10001 --create-home servekit \
    && install -d -o servekit -g servekit /cache /run/servekit
COPY --from=build /opt/servekit /opt/servekit
# NVML, by which GPUs are found, is in the driver's "utility" part; which GPUs, `--gpus` or the device
# plugin says: "all" here would take them where none were asked for. The run directory is made by
# servekit itself: what is mounted at its parent belongs to root.
ENV PATH=/opt/servekit/bin:$PATH \
    HOME=/cache/home \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    SERVEKIT_RUN_DIR=/run/servekit/instance \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# By number: Kubernetes cannot tell by a name that it is not root.
USER 10001:10001
WORKDIR /cache
VOLUME /cache
EXPOSE 8000
# Asked of the supervisor, so that it needs no port, no certificate and no key. Ready is a long way
# off while a large model loads; alive is another question (/livez).
HEALTHCHECK --interval=10s --timeout=10s --start-period=30m --retries=3 \
    CMD ["servekit", "ps", "--ready"]
CMD ["servekit", "up", "--config", "/config.yaml", "--host", "0.0.0.0"]
