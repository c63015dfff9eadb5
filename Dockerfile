# servekit in a container. Build, with PyTorch's CPU index to leave CUDA out if you wish:
#
#     docker build -t servekit .            [--build-arg PIP_EXTRA_INDEX_URL=...]
#     docker run --init --gpus all -p 8000:8000 -v ./my.yaml:/config.yaml:ro -v models:/cache servekit
#
# The file needs `keys` (docker run --rm servekit servekit key new), or else `-e SERVEKIT_INSECURE=1`
# says that whoever reaches the published port may use it. With `server.tls`, give a --health-cmd.
#
# Keep `port: 8000` in the file; the host is 0.0.0.0 here whatever the file says, because a
# container's loopback is reached by nobody.

FROM python:3.11-slim AS build
ARG PIP_EXTRA_INDEX_URL
WORKDIR /build
RUN python -m venv /opt/servekit
# The dependencies by themselves, so that a change of servekit does not fetch them again.
COPY pyproject.toml README.md LICENSE ./
COPY deploy/constraints.txt deploy/
RUN mkdir servekit && touch servekit/__init__.py \
    && /opt/servekit/bin/pip install --no-cache-dir -c deploy/constraints.txt .
COPY servekit servekit
RUN /opt/servekit/bin/pip install --no-cache-dir --no-deps --force-reinstall .

FROM python:3.11-slim
RUN useradd --uid 10001 --create-home servekit && install -d -o servekit -g servekit /cache
COPY --from=build /opt/servekit /opt/servekit
# NVML, by which GPUs are found, is in the driver's "utility" part.
ENV PATH=/opt/servekit/bin:$PATH \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER servekit
WORKDIR /home/servekit
VOLUME /cache
EXPOSE 8000
# Ready is a long way off while a large model loads; alive is another question (/livez).
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
CMD ["servekit", "up", "--config", "/config.yaml", "--host", "0.0.0.0"]
