#!/usr/bin/env bash
# Sets up the environment and runs the test suite; arguments go to pytest.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
# Two cores stay responsive only if every test process keeps to one thread.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python -m pytest "$@"
