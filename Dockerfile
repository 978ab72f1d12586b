# `polar`: one image for every Python service. `engine-gpu`: the same code with vLLM's CUDA build.
FROM python:3.11-slim-bookworm AS base
RUN apt-get update -qq \
 && apt-get install -qq -y --no-install-recommends python3-venv bubblewrap nodejs npm curl libgomp1 libnuma1 \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv PYTHONUNBUFFERED=1 POLAR_HARNESS_DIR=/opt/harnesses POLAR_RUN_DIR=/data
WORKDIR /app
RUN python3 -m venv /opt/venv
COPY requirements requirements

FROM base AS polar
RUN pip install --no-cache-dir -q torch==2.13.0 \
 && pip install --no-cache-dir -q --no-deps -r requirements/engine-cpu.txt -r requirements/project.txt
# Names of presets, for a smaller image: --build-arg HARNESSES="pi codex"
ARG HARNESSES=--all
COPY polar polar
COPY schemas schemas
RUN python -m polar.cli harness install $HARNESSES
COPY . .
RUN pip install --no-cache-dir -q --no-deps -e .

FROM base AS engine-gpu
RUN pip install --no-cache-dir -q -r requirements/engine-gpu.txt
COPY . .
RUN pip install --no-cache-dir -q --no-deps -e .
