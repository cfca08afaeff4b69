# Stagewright on CUDA, as a user that is not root. docs/install.md says which CUDA and torch a card needs.
#
#   docker build -t stagewright .
#   docker build -t stagewright --build-arg CUDA=12.6.3 --build-arg INDEX=cu126 .      # Pascal and Volta
#   docker run --rm --gpus all --ipc host --user "$(id -u)" -e HOME=/tmp -v "$PWD:/work" stagewright selftest

ARG CUDA=13.0.2

FROM nvidia/cuda:${CUDA}-base-ubuntu24.04 AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/stagewright
ENV PATH=/opt/stagewright/bin:$PATH
# torch brings the CUDA libraries of its build, so the base image needs none.
ARG TORCH=2.13.0
ARG INDEX=cu130
RUN pip install --no-cache-dir "torch==${TORCH}" --index-url "https://download.pytorch.org/whl/${INDEX}"
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source \
    && pip install --no-cache-dir /wheels/*.whl

FROM nvidia/cuda:${CUDA}-base-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 stagewright \
    && install -d -o stagewright /work
COPY --from=build /opt/stagewright /opt/stagewright
ENV PATH=/opt/stagewright/bin:$PATH \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /work
ENTRYPOINT ["stagewright"]
CMD ["--help"]
