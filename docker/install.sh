#!/usr/bin/env bash
# docker/install.sh [cpu|cuda]: install this checkout, with the tested versions of its packages, into the
# current Python environment. The same commands as in docs/installation.md; the Dockerfiles run this script.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-cpu}" in
    cpu) python -m pip install --no-deps -r requirements.txt -e . ;;
    cuda) python -m pip install --no-deps -r requirements-cuda.txt -e . ;;
    *)
        echo "unknown target: $1 (cpu or cuda)" >&2
        exit 2
        ;;
esac
