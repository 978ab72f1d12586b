# `polar`: one image for every Python service. `engine-gpu`: the same code with vLLM's CUDA build.
FROM python:3.11-slim-bookworm AS base
RUN apt-get update -qq \
 && apt-get install -qq -y --no-install-recommends python3-venv bubblewrap nodejs npm curl libgomp1 libnuma1 \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv PYTHONUNBUFFERED=1 POLAR_NPM_PREFIX=/opt/npm POLAR_RUN_DIR=/data
WORKDIR /app
RUN python3 -m venv /opt/venv
COPY requirements requirements

FROM base AS polar
RUN pip install --no-cache-dir -q torch==2.13.0 \
 && pip install --no-cache-dir -q --no-deps -r requirements/engine-cpu.txt -r requirements/project.txt
RUN npm install --prefix /opt/npm --no-fund --no-audit --loglevel=error node@22.23.3 @earendil-works/pi-coding-agent@0.74.2
COPY . .
RUN pip install --no-cache-dir -q --no-deps -e .

FROM base AS engine-gpu
RUN pip install --no-cache-dir -q -r requirements/engine-gpu.txt
COPY . .
RUN pip install --no-cache-dir -q --no-deps -e .
